"""Waiting, with an end to it, for states that send no signal."""

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

PATIENCE_S: Final = 60.0
_PAUSE_S: Final = 0.02

T = TypeVar("T")


def until(
    look: Callable[[], T | None],
    what: str | Callable[[], str],
    *,
    within_s: float = PATIENCE_S,
    pause_s: float = _PAUSE_S,
) -> T:
    """Return the result of `look` as soon as it is true.

    AssertionError naming `what`, with the last look, when it is not in time.
    """
    pause = threading.Event()
    deadline = time.monotonic() + within_s
    while not (found := look()):
        if time.monotonic() >= deadline:
            named = what if isinstance(what, str) else what()
            raise AssertionError(f"waited {within_s:g} s in vain for {named}; last seen: {found!r}")
        pause.wait(pause_s)
    return found
