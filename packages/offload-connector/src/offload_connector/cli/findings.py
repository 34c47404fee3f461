"""What `check` has to say, one finding at a time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

ERROR, WARNING, NOTE = "error", "warning", "note"


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        level: "error": vLLM will not start, or will not do what the text asks for. "warning": it starts, but this is
            hardly meant. "note": for information.
        where: the option and the path within it, or the resource of the host.
        message: what is the matter, and what to write or set.
        line: of the text, from 1; None where a place in the text has no meaning.
        column: from 1.
        corrected: the line as it should be, where that is certain.
    """

    level: str
    where: str
    message: str
    line: int | None = None
    column: int | None = None
    corrected: str | None = None

    def __str__(self) -> str:
        place = f", line {self.line}, column {self.column}" if self.line else ""
        text = f"{self.level}: {self.where}{place}: {self.message}"
        return text if self.corrected is None else f"{text}\n    write: {self.corrected.strip()}"

    def as_json(self) -> dict[str, Any]:
        """The finding without what it does not have."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def is_bad(findings: list[Finding]) -> bool:
    """Whether some finding is more than a note."""
    return any(finding.level != NOTE for finding in findings)
