"""How calls without an answer are repeated."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from delivery.magazines.store import DoubtError
from rooms.errors import MagazineUnavailableError

_T = TypeVar("_T")
RESTART_S: Final = 0.2
"""No server dies, starts again and takes writes within so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """How often what is safe to repeat is repeated, and how long a hole and a done slot are remembered."""

    retries: int
    sleep_s: float
    mark_s: int

    def attempts(self) -> range:
        """Numbers of the attempts."""
        return range(self.retries + 1)

    def again(self, call: Callable[[], _T], *, sleep: Callable[[float], None] = time.sleep) -> _T:
        """Repeat what is safe to repeat (row C5). MagazineUnavailableError when the last attempt had no answer either."""
        for attempt in self.attempts():
            try:
                return call()
            except DoubtError as exc:
                if attempt == self.retries:
                    raise MagazineUnavailableError(str(exc)) from exc
                sleep(self.sleep_s)
        raise AssertionError("unreachable")

    @property
    def patience_s(self) -> float:
        """A loader trusts the slots it claimed for so long."""
        return self.mark_s / 4
