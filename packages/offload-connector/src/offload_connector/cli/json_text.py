"""JSON as people type it into a shell: where it is wrong, and what to write.

A fault whose meaning is certain (a trailing comma, Python's True, single quotes, a comment) is mended in place, with as
many characters, so that positions stay right and the rest of the text can be read as well.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from offload_connector.cli.findings import ERROR, WARNING, Finding

WORDS = {"True": "true", "False": "false", "None": "null"}
CLOSING = {"{": "}", "[": "]"}
TOO_MANY = 50


@dataclass(frozen=True)
class _Fault:
    """What is wrong at `position`: `width` characters there should be `instead`; None where that is not certain."""

    position: int
    message: str
    width: int = 0
    instead: str | None = None

    def mended(self, text: str) -> str | None:
        """The text with as many characters as before, or None where the mended part is longer."""
        if self.instead is None or len(self.instead) > self.width:
            return None
        return text[: self.position] + self.instead.ljust(self.width) + text[self.position + self.width :]

    def corrected_line(self, text: str) -> str | None:
        if self.instead is None:
            return None
        start = text.rfind("\n", 0, self.position) + 1
        end = text.find("\n", self.position + self.width)
        end = len(text) if end < 0 else end
        return text[start : self.position] + self.instead + text[self.position + self.width : end]


def read_json(text: str, where: str) -> tuple[Any, list[Finding]]:
    """Parse `text`.

    Args:
        text: as given on the command line or in a file.
        where: the option, for the findings.

    Returns:
        (the value, mended where needed, or None where it cannot be; all faults of the text).
    """
    findings: list[Finding] = []
    twice: list[str] = []

    def note_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice.extend(sorted({name for name in names if names.count(name) > 1}))
        return dict(pairs)

    for _ in range(TOO_MANY):
        twice.clear()
        try:
            value = json.loads(text, object_pairs_hook=note_twice)
        except json.JSONDecodeError as error:
            fault = _diagnose(text, error)
            line = text.count("\n", 0, fault.position) + 1
            column = fault.position - text.rfind("\n", 0, fault.position)
            findings.append(Finding(ERROR, where, fault.message, line, column, fault.corrected_line(text)))
            mended = fault.mended(text)
            if mended is None:
                return None, findings
            text = mended
        else:
            for name in twice:
                findings.append(Finding(WARNING, where, f"the key {name!r} is there twice; only the last one counts"))
            return value, findings
    return None, findings


def _diagnose(text: str, error: json.JSONDecodeError) -> _Fault:
    at = error.pos
    if not text.strip():
        return _Fault(0, "the text is empty; the shell may have taken it: put single quotes around the JSON")
    # Python says where the value stops making sense: newer versions at the comma, older ones behind it.
    comma = at if text[at : at + 1] == "," else len(text[:at].rstrip()) - 1
    after = text[comma + 1 :].lstrip() if comma >= 0 else ""
    if comma >= 0 and text[comma] == "," and after[:1] in ("}", "]"):
        return _Fault(comma, f"a comma before {after[0]!r} is not JSON; take it out", 1, "")
    rest = text[at:]
    for word, instead in WORDS.items():
        if re.match(rf"{word}\b", rest):
            return _Fault(at, f"{word} is Python, not JSON; write {instead}", len(word), instead)
    if comment := re.match(r"(//|#)[^\n]*|/\*.*?\*/", rest, re.DOTALL):
        if "\n" not in comment[0]:
            return _Fault(at, "JSON has no comments; take it out", len(comment[0]), "")
        return _Fault(at, "JSON has no comments; take it out")
    if quoted := re.match(r"'([^'\"\n]*)'|[“”]([^“”\"\n]*)[“”]", rest):
        name = quoted[1] if quoted[1] is not None else quoted[2]
        return _Fault(at, "JSON wants double quotes", len(quoted[0]), f'"{name}"')
    if name := re.match(r"[A-Za-z_][\w.-]*", rest):
        hint = "; if you did write them, the shell took them: put single quotes around the whole JSON"
        return _Fault(at, f"{name[0]} needs double quotes{hint}", len(name[0]), f'"{name[0]}"')
    return _structure(text, at, error)


def _structure(text: str, at: int, error: json.JSONDecodeError) -> _Fault:
    """A fault of brackets and separators."""
    open_brackets = _open_brackets(text[:at])
    if not text[at:].strip():
        missing = "".join(CLOSING[bracket] for bracket in reversed(open_brackets))
        if not missing:
            return _Fault(at, "the text ends in the middle of a value")
        return _Fault(len(text.rstrip()), f"the text ends too early: {missing} is missing at its end", 0, missing)
    if error.msg.startswith("Extra data"):
        return _Fault(at, "there is text behind the end of the JSON; take it out, or a bracket too many before it")
    if error.msg.startswith("Expecting ',' delimiter"):
        if text[at] in "}]":
            expected = CLOSING[open_brackets[-1]]
            return _Fault(at, f"{open_brackets[-1]!r} is closed by {text[at]!r}; write {expected!r}", 1, expected)
        end = len(text[:at].rstrip())
        return _Fault(end, "a comma is missing here", 0, ",")
    return _Fault(at, f"not JSON: {error.msg[0].lower()}{error.msg[1:]}")


def _open_brackets(text: str) -> list[str]:
    stack: list[str] = []
    for token in re.finditer(r'"(?:\\.|[^"\\])*"|[{}\[\]]', text):
        if token[0] in CLOSING:
            stack.append(token[0])
        elif token[0] in CLOSING.values() and stack:
            stack.pop()
    return stack
