"""The books in short: is anything lost, and is all of the log there?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Row = Mapping[str, Any]
_KEYS: Final = frozenset({"hour", "room_id"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Sums over all rooms and hours, what is wrong by room, and the holes of the log itself."""

    sums: Mapping[str, int]
    rooms: Mapping[int, Mapping[str, int]]
    """Only those with something missing, lost, or without its beginning."""
    gaps: Sequence[Row]

    @property
    def lost(self) -> int:
        """Deliveries that should be and of which no state tells anything: passed over, or never there."""
        return self._sum("lost") + self._sum("missing")

    @property
    def log_rows_missing(self) -> int:
        """Rows of the log that were written and are not there, as far as it reaches back."""
        return sum(gap["missing"] for gap in self.gaps if not gap["before"])

    @property
    def doubtful(self) -> int:
        """Deliveries and messages whose beginning the log does not have, and what the books leave over."""
        return sum(
            abs(self._sum(name)) for name in ("never_enqueued", "unanchored", "residual_fanout", "residual_outcome")
        )

    @property
    def closed(self) -> bool:
        """Nothing is lost, and the log has everything that says so."""
        return not (self.lost or self.log_rows_missing or self.doubtful)

    def told(self) -> dict[str, Any]:
        """For programs. `lost` is `passed_over` and `missing` together."""
        sums = dict(self.sums)
        passed_over = sums.pop("lost", 0)
        return {
            "closed": self.closed,
            "lost": self.lost,
            "passed_over": passed_over,
            "log_rows_missing": self.log_rows_missing,
            **sums,
            "rooms": [{"room_id": room, **found} for room, found in self.rooms.items()],
            "gaps": [dict(gap) for gap in self.gaps],
        }

    def _sum(self, name: str) -> int:
        return self.sums.get(name, 0)


def books_of(read: Callable[[str], Sequence[Row]]) -> Books:
    """From the analysis' tables `reconciliation` and `gaps`."""
    sums: dict[str, int] = {}
    rooms: dict[int, dict[str, int]] = {}
    for row in read("reconciliation"):
        of_room = rooms.setdefault(row["room_id"], {})
        for name, value in row.items():
            if name not in _KEYS:
                sums[name] = sums.get(name, 0) + value
                of_room[name] = of_room.get(name, 0) + value
    wrong = ("lost", "missing", "never_enqueued", "unanchored")
    told = {room: {name: of[name] for name in wrong} for room, of in sorted(rooms.items()) if any(map(of.get, wrong))}
    return Books(sums=sums, rooms=told, gaps=list(read("gaps")))
