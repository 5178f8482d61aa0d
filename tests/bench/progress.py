"""Report the progress of a long scenario every few seconds."""

# ruff: noqa: T201 what a bench does is printed

import time
from typing import Final

EVERY_S: Final = 5.0


class Progress:
    """Report how far `what` is: at most every few seconds, and a new step at once."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._next = 0.0

    def step(self, what: str) -> None:
        """Something else begins."""
        self._print(what)

    def count(self, what: str, done: int, total: int) -> None:
        """So many of all are done."""
        if time.monotonic() >= self._next:
            self._print(f"{what}: {done:,} of {total:,}")

    def _print(self, text: str) -> None:
        now = time.monotonic()
        self._next = now + EVERY_S
        print(f"    {self._what}, {now - self._began:.0f} s: {text}", flush=True)
