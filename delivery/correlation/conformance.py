"""Which sequences of log kinds the transition table allows, as an automaton over sets of states.

A kind may stand for several events (`retry_scheduled` leaves a delivery queued or scheduled), so the automaton keeps every
state that the rows so far allow. The only thing said here is which events a kind reports; what they do stands in
`rooms.domain.transitions`.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from rooms.domain.states import Event, LogKind, State
from rooms.domain.transitions import move

REPORTS: Final[Mapping[LogKind, frozenset[Event]]] = MappingProxyType(
    {
        LogKind.PUBLISHED: frozenset(),
        LogKind.ENQUEUED: frozenset({Event.PUBLISH, Event.PUBLISH_LATER}),
        LogKind.REPLAYED: frozenset({Event.PUBLISH, Event.PUBLISH_LATER}),
        LogKind.ATTEMPTED: frozenset(),
        LogKind.RETRY_SCHEDULED: frozenset({Event.FAILED, Event.FAILED_LATER}),
        LogKind.HELD: frozenset({Event.HOLD}),
        LogKind.COMING_DUE: frozenset({Event.HORIZON_REACHED}),
        LogKind.RELEASED: frozenset({Event.RELEASE}),
        LogKind.LEASED: frozenset({Event.PULLED}),
        LogKind.LEASE_ENDED: frozenset({Event.LEASE_ENDED}),
        LogKind.PULL_ACKED: frozenset({Event.ACKED}),
        LogKind.NACKED: frozenset({Event.NACKED, Event.NACKED_LATER}),
        LogKind.SIDELINED: frozenset({Event.GAVE_UP, Event.RECEIVES_SPENT, Event.REJECTED}),
        LogKind.SWEPT: frozenset(),
        LogKind.SHOVELED: frozenset({Event.SHOVEL}),
        LogKind.DELIVERED: frozenset({Event.SUCCEEDED, Event.LATE_SUCCESS}),
        LogKind.EXPIRED: frozenset({Event.EXPIRE}),
        LogKind.CANCELLED: frozenset({Event.CANCEL}),
        LogKind.DROPPED: frozenset({Event.IGNORED}),
        LogKind.PURGED: frozenset({Event.PURGE}),
        LogKind.HANDED_OVER: frozenset({Event.HAND_OVER}),
        LogKind.RESTORED: frozenset({Event.RESTORE, Event.REFRESH, Event.REFRESH_LATER}),
    }
)
"""What each kind tells of a delivery. Kinds that tell no event are notes: they move nothing."""

CODES: Final[Mapping[LogKind, int]] = MappingProxyType({kind: number for number, kind in enumerate(LogKind, 1)})
"""A small number for each kind; 0 stands for one that this version does not know."""

STARTS: Final = frozenset(
    {
        LogKind.ENQUEUED,
        LogKind.REPLAYED,
        LogKind.RETRY_SCHEDULED,
        LogKind.RELEASED,
        LogKind.LEASE_ENDED,
        LogKind.NACKED,
        LogKind.SHOVELED,
        LogKind.RESTORED,
    }
)
"""Kinds whose row carries the step that they begin; every other row carries the step it happened in."""

FINALS: Final = frozenset({LogKind.DELIVERED, LogKind.PULL_ACKED, LogKind.PURGED})
"""After these nothing moves a delivery, though a late success may carry an older step than the rows before it."""

_RANKS: Final[Mapping[LogKind, int]] = MappingProxyType(
    dict.fromkeys(STARTS, 0)
    | {
        LogKind.COMING_DUE: 1,
        LogKind.SWEPT: 1,
        LogKind.LEASED: 2,
        LogKind.ATTEMPTED: 3,
        LogKind.HELD: 4,
        LogKind.HANDED_OVER: 4,
    }
    | {LogKind.SIDELINED: 5}
    | dict.fromkeys((LogKind.EXPIRED, LogKind.CANCELLED, LogKind.DROPPED), 6)
    | dict.fromkeys(FINALS, 7)
    # What was delivered is delivered, whatever else its rows pretend.
    | {LogKind.PURGED: 6}
)
_CODE_BITS: Final = 5
_RANK_BITS: Final = 3
_ATTEMPT_BITS: Final = 24
_GENERATION_BITS: Final = 30


def rank(kind: LogKind) -> int:
    """The place of a kind among the rows of one step."""
    return _RANKS.get(kind, 0)


def order_key(kind: LogKind, generation: int, attempt: int) -> int:
    """A number by which the rows of a delivery sort into the order in which they happened, whatever the clocks say.

    (generation, attempt) only ever grows; a final kind comes last. The lowest five bits are the kind's code. Holds up to
    2**30 generations of 2**24 attempts.
    """
    return order_base(kind) | (generation << GENERATION_SHIFT) | (attempt << ATTEMPT_SHIFT)


ATTEMPT_SHIFT: Final = _CODE_BITS + _RANK_BITS
GENERATION_SHIFT: Final = ATTEMPT_SHIFT + _ATTEMPT_BITS
CODE_MASK: Final = (1 << _CODE_BITS) - 1
_FINAL: Final = 1 << (GENERATION_SHIFT + _GENERATION_BITS)


def order_base(kind: LogKind) -> int:
    """The part of the order key that the kind alone decides."""
    return (_FINAL if kind in FINALS else 0) | (rank(kind) << _CODE_BITS) | CODES[kind]


def _step(states: frozenset[State | None], kind: LogKind) -> frozenset[State | None]:
    events = REPORTS[kind]
    if not events:
        return states - {None} if None in states else states
    found = {moved.to for state in states for event in events if (moved := move(state, event)) is not None}
    return frozenset[State | None](found)


def _automaton() -> tuple[tuple[int, ...], ...]:
    kinds = [None, *CODES]
    dead: frozenset[State | None] = frozenset()
    born: frozenset[State | None] = frozenset({None})
    sets = [dead, born]
    rows: list[tuple[int, ...]] = []
    for states in sets:  # grows while it is walked
        row = []
        for kind in kinds:
            after = dead if kind is None else _step(states, kind)
            if after not in sets:
                sets.append(after)
            row.append(sets.index(after))
        rows.append(tuple(row))
    return tuple(rows)


TABLE: Final = _automaton()
"""`TABLE[state][code]` is the next state; 0 is where an illegal path ends, 1 where every path begins."""
DEAD: Final = 0
BEGIN: Final = 1


def legal(path: Iterable[LogKind]) -> bool:
    """Whether a delivery may have gone this way."""
    state = BEGIN
    for kind in path:
        state = TABLE[state][CODES[kind]]
    return state != DEAD
