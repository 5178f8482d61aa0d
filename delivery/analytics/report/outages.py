"""Turn incidents into outages, each of which appears once, and find those that go on.

Pieces of one outage are joined: incidents of mostly the same subscriptions, a quarter of an hour
apart at most.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

Row = Mapping[str, Any]
_JOINED_WITHIN: Final = timedelta(minutes=15)
_SAME_SHARE: Final = 0.5
_OPEN_WITHIN: Final = timedelta(minutes=3)
"""Time before the end of the log from which an incident goes on, if its row does not say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """Subscriptions that failed together, with the earliest and latest begin and end.

    The intervals are None where the analysis gives none. `late` and `sidelined` count deliveries.
    """

    number: int
    kind: str
    began: datetime
    ended: datetime
    began_between: tuple[datetime, datetime] | None
    ended_between: tuple[datetime, datetime] | None
    is_open: bool
    subscriptions: tuple[str, ...]
    failures: int
    attempts: int
    late: int | None
    sidelined: int | None
    causes: Sequence[Row]
    pieces: int = 1

    @property
    def cost(self) -> tuple[int, int]:
        """Return what orders outages: sidelined and late deliveries, then failed attempts."""
        return ((self.sidelined or 0) + (self.late or 0), self.failures)

    @property
    def anchor(self) -> str:
        """Return the anchor of its section."""
        return f"outage-{self.number}"


def find_outages(incidents: Iterable[Row], log_end: datetime | None) -> list[Outage]:
    """Return the outages by begin."""
    outages: list[Outage] = []
    for row in sorted(incidents, key=lambda row: (row["began"], row["incident"])):
        piece = _outage(row, log_end)
        place = next(
            (place for place, one in enumerate(outages) if _is_one(one, piece)), len(outages)
        )
        outages[place : place + 1] = [
            piece if place == len(outages) else _joined(outages[place], piece)
        ]
    return outages


def by_cost(outages: Iterable[Outage]) -> list[Outage]:
    """Return the outages, the worst first; those that go on are left out, as they come before."""
    over = [one for one in outages if not one.is_open]
    return sorted(over, key=lambda one: (-one.cost[0], -one.cost[1], one.number))


def _outage(row: Row, log_end: datetime | None) -> Outage:
    known = row.get("open")
    ends = row["ended"]
    is_open = (
        log_end is not None and ends >= log_end - _OPEN_WITHIN if known is None else bool(known)
    )
    return Outage(
        number=row["incident"],
        kind=row["kind"],
        began=row["began"],
        ended=ends,
        began_between=_interval(row, "began"),
        ended_between=_interval(row, "ended"),
        is_open=is_open,
        subscriptions=tuple(row["subscriptions"]),
        failures=row["failures"],
        attempts=row["attempts"],
        late=row.get("late"),
        sidelined=row.get("sidelined"),
        causes=row["causes"] or (),
    )


def _interval(row: Row, name: str) -> tuple[datetime, datetime] | None:
    low, high = row.get(f"{name}_from"), row.get(f"{name}_to")
    return None if low is None or high is None else (low, high)


def _is_one(outage: Outage, piece: Outage) -> bool:
    mine, other = set(outage.subscriptions), set(piece.subscriptions)
    return (
        outage.kind == piece.kind
        and piece.began - outage.ended <= _JOINED_WITHIN
        and len(mine & other) > _SAME_SHARE * len(mine | other)
    )


def _joined(outage: Outage, piece: Outage) -> Outage:
    larger = max(outage, piece, key=lambda one: one.failures)
    last = max(outage, piece, key=lambda one: one.ended)
    return replace(
        outage,
        ended=last.ended,
        ended_between=last.ended_between,
        is_open=outage.is_open or piece.is_open,
        subscriptions=tuple(sorted({*outage.subscriptions, *piece.subscriptions})),
        failures=outage.failures + piece.failures,
        attempts=outage.attempts + piece.attempts,
        late=_added(outage.late, piece.late),
        sidelined=_added(outage.sidelined, piece.sidelined),
        causes=larger.causes,
        pieces=outage.pieces + 1,
    )


def _added(first: int | None, second: int | None) -> int | None:
    return None if first is None and second is None else (first or 0) + (second or 0)
