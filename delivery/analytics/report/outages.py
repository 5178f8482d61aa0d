"""Turn incidents into outages, each of which appears once, and find those that go on.

Pieces of one outage are joined: incidents of mostly the same subscriptions, five minutes
apart at most, whose causes do not contradict each other. Outages of the same subscriptions and
cause are one problem that comes back.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from delivery.analytics.findings.cells import FAILURE_ATTRIBUTES

Row = Mapping[str, Any]
_JOINED_WITHIN: Final = timedelta(minutes=5)
_SAME_SHARE: Final = 0.5
_OPEN_WITHIN: Final = timedelta(minutes=3)
"""Time before the end of the log from which an incident goes on, if its row does not say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """Hold subscriptions that failed together, with the earliest and latest begin and end.

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
    earlier: int = 0
    """Outages before it of mostly the same subscriptions and one cause."""
    changes: Sequence[Row] = ()
    """Versions, workers and settings that were first used right before it."""
    pieces: int = 1
    went_on: bool = False
    """True if it went on when the log ended, and the service that was asked does not name it."""

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


def confirm_open(outages: Iterable[Outage], failing: AbstractSet[str]) -> list[Outage]:
    """Return the outages; only those of subscriptions that fail now go on.

    Others may be over, or are of subscriptions that the service does not name.
    """
    return [
        replace(one, is_open=False, went_on=True)
        if one.is_open and failing.isdisjoint(one.subscriptions)
        else one
        for one in outages
    ]


def by_cost(outages: Iterable[Outage]) -> list[Outage]:
    """Return the outages, the worst first; those that go on are left out, as they come before."""
    over = [one for one in outages if not one.is_open]
    return sorted(over, key=lambda one: (-one.cost[0], -one.cost[1], one.number))


def problems(outages: Iterable[Outage]) -> list[list[Outage]]:
    """Return groups of outages that are one problem, the costliest group and outage first."""
    groups: list[list[Outage]] = []
    for outage in by_cost(outages):
        group = next((one for one in groups if _recurs(one[0], outage)), None)
        if group is None:
            groups.append([outage])
        else:
            group.append(outage)
    return sorted(
        groups,
        key=lambda group: [-sum(costs) for costs in zip(*(one.cost for one in group), strict=True)],
    )


def _recurs(first: Outage, other: Outage) -> bool:
    return (
        first.kind == other.kind
        and _top_cause(first) == _top_cause(other)
        and _overlap(first, other) > _SAME_SHARE
    )


def _top_cause(outage: Outage) -> tuple[str, str] | None:
    return (outage.causes[0]["attribute"], outage.causes[0]["value"]) if outage.causes else None


def _overlap(first: Outage, other: Outage) -> float:
    mine, theirs = set(first.subscriptions), set(other.subscriptions)
    return len(mine & theirs) / max(len(mine | theirs), 1)


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
        earlier=row.get("earlier") or 0,
        changes=row.get("changes") or (),
    )


def _interval(row: Row, name: str) -> tuple[datetime, datetime] | None:
    low, high = row.get(f"{name}_from"), row.get(f"{name}_to")
    return None if low is None or high is None else (low, high)


def _is_one(outage: Outage, piece: Outage) -> bool:
    return (
        outage.kind == piece.kind
        and piece.began - outage.ended <= _JOINED_WITHIN
        and _overlap(outage, piece) > _SAME_SHARE
        and _may_agree(_origins(outage), _origins(piece))
    )


def _may_agree(first: AbstractSet[object], other: AbstractSet[object]) -> bool:
    """Return True unless both name causes, and none in common."""
    return not first or not other or not first.isdisjoint(other)


def _origins(outage: Outage) -> set[tuple[str, str]]:
    """Return its causes, without kinds of errors: one cause may have several, and the reverse."""
    return {
        (cause["attribute"], cause["value"])
        for cause in outage.causes
        if cause["attribute"] not in FAILURE_ATTRIBUTES
    }


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
