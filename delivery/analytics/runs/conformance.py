"""Check sequences of log kinds against the transition table, as an automaton over sets of states.

A kind may report several events (`retry_scheduled` leaves a delivery queued or scheduled). The
automaton therefore keeps every state that the rows so far allow. Only the events of each kind are
defined here; their transitions are in `rooms.domain.state_machine`.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from rooms.domain.state_machine import Event, LogKind, State, transition

EVENTS_BY_KIND: Final[Mapping[LogKind, frozenset[Event]]] = MappingProxyType(
    {
        LogKind.PUBLISHED: frozenset(),
        LogKind.ENQUEUED: frozenset({Event.PUBLISH, Event.PUBLISH_LATER}),
        LogKind.REPLAYED: frozenset({Event.PUBLISH, Event.PUBLISH_LATER}),
        LogKind.ATTEMPTED: frozenset(),
        LogKind.RETRY_SCHEDULED: frozenset({Event.FAILED, Event.FAILED_LATER}),
        LogKind.HELD: frozenset({Event.HOLD}),
        LogKind.COMING_DUE: frozenset({Event.LOOKAHEAD_REACHED}),
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
"""Events that each kind reports. A kind without events changes no state."""

CODES: Final[Mapping[LogKind, int]] = MappingProxyType(
    {kind: number for number, kind in enumerate(LogKind, 1)}
)
"""A small number for each kind; 0 is a kind that this version does not know."""

STEP_STARTS: Final = frozenset(
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
"""Kinds whose row carries the step that they begin; other rows carry the current step."""

FINAL_KINDS: Final = frozenset({LogKind.DELIVERED, LogKind.PULL_ACKED, LogKind.PURGED})
"""Kinds that end a delivery. A late success may still carry an older step."""

_RANKS: Final[Mapping[LogKind, int]] = MappingProxyType(
    dict.fromkeys(STEP_STARTS, 0)
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
    | dict.fromkeys(FINAL_KINDS, 7)
    # A delivered delivery sorts last, whatever other rows it has.
    | {LogKind.PURGED: 6}
)
_CODE_BITS: Final = 5
_RANK_BITS: Final = 3
_ATTEMPT_BITS: Final = 24
_GENERATION_BITS: Final = 30


def kind_rank(kind: LogKind) -> int:
    """Return the position of a kind among the rows of one step."""
    return _RANKS.get(kind, 0)


ATTEMPT_SHIFT: Final = _CODE_BITS + _RANK_BITS
GENERATION_SHIFT: Final = ATTEMPT_SHIFT + _ATTEMPT_BITS
CODE_MASK: Final = (1 << _CODE_BITS) - 1
_FINAL: Final = 1 << (GENERATION_SHIFT + _GENERATION_BITS)


def order_base(kind: LogKind) -> int:
    """Return the part of the order key that depends only on the kind.

    The key sorts the rows of a delivery by causal order, independent of clocks: (generation,
    attempt) never decreases, and a final kind comes last. The lowest five bits are the kind's code.
    There is room for 2**30 generations of 2**24 attempts.
    """
    return (_FINAL if kind in FINAL_KINDS else 0) | (kind_rank(kind) << _CODE_BITS) | CODES[kind]


def _next_states(states: frozenset[State | None], kind: LogKind) -> frozenset[State | None]:
    events = EVENTS_BY_KIND[kind]
    if not events:
        return states - {None} if None in states else states
    found = {
        moved.to
        for state in states
        for event in events
        if (moved := transition(state, event)) is not None
    }
    return frozenset[State | None](found)


def _build_automaton() -> tuple[tuple[int, ...], ...]:
    kinds = [None, *CODES]
    dead: frozenset[State | None] = frozenset()
    born: frozenset[State | None] = frozenset({None})
    sets = [dead, born]
    rows: list[tuple[int, ...]] = []
    for states in sets:  # grows during the iteration
        row = []
        for kind in kinds:
            after = dead if kind is None else _next_states(states, kind)
            if after not in sets:
                sets.append(after)
            row.append(sets.index(after))
        rows.append(tuple(row))
    return tuple(rows)


TRANSITIONS: Final = _build_automaton()
"""`TRANSITIONS[state][code]` is the next state; 0 ends an illegal path, 1 begins every path."""
ILLEGAL: Final = 0
INITIAL: Final = 1


def is_legal(codes: Iterable[int]) -> bool:
    """Return True if the transition table allows the kinds with these codes, in this order."""
    state = INITIAL
    for code in codes:
        state = TRANSITIONS[state][code]
    return state != ILLEGAL
