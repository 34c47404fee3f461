"""What the demo shows while it runs: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress


class Progress:
    """Phases of the demo, shown one after the other on ``console``."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show that ``name`` goes on until the block ends."""
        with self._shown(name, None):
            yield

    @contextmanager
    def tokens(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show how many of ``total`` tokens have come; call what this yields with each number of new ones."""
        with self._shown(f"{name}: tokens", total) as advance:
            yield advance

    @contextmanager
    def _shown(self, name: str, total: int | None) -> Iterator[Callable[[int], None]]:
        began = time.monotonic()
        if self._console.is_terminal:
            bar = [BarColumn(), MofNCompleteColumn()] if total is not None else []
            columns = [SpinnerColumn(), TextColumn("{task.description}"), *bar, TimeElapsedColumn()]
            with RichProgress(*columns, console=self._console, transient=True) as shown:
                task = shown.add_task(name, total=total)
                yield lambda count: shown.advance(task, count)
        else:
            self._line(f"{name} ...")
            yield lambda count: None
        self._line(f"{name} done in {time.monotonic() - began:.1f} s")

    def _line(self, text: str) -> None:
        self._console.print(f"[{time.monotonic() - self._began:6.1f} s] {text}", markup=False, highlight=False)
