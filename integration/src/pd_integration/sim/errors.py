"""What the simulator raises when something that must hold does not."""


class Violation(Exception):
    """`kind` names what must hold; runs that fail with the same kind count as the same failure."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
