"""The one table of what may follow what: (state, event) → state, and how generation and attempt move.

Storage writes these moves as compare-and-set statements; nothing else decides a state. A pair that is not in the
table is not allowed: the copy, claim or request that asked for it is stale and changes nothing.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from rooms.domain.states import UNFINISHED, Event, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Where an event leads. A new generation makes every older copy stale; `attempt` is kept, counted up or reset."""

    to: State
    generation: int = 0
    attempt: int | None = 0
    """Added to the attempt; None sets it back to 0."""


def _table() -> dict[tuple[State | None, Event], Move]:
    queued, held, leased, sidelined = State.QUEUED, State.HELD, State.LEASED, State.SIDELINED
    table: dict[tuple[State | None, Event], Move] = {
        (None, Event.PUBLISH): Move(to=queued),
        (None, Event.PUBLISH_LATER): Move(to=State.SCHEDULED),
        (State.SCHEDULED, Event.HORIZON_REACHED): Move(to=queued),
        (queued, Event.SUCCEEDED): Move(to=State.DELIVERED),
        (queued, Event.FAILED): Move(to=queued, attempt=1),
        (queued, Event.FAILED_LATER): Move(to=State.SCHEDULED, attempt=1),
        (queued, Event.GAVE_UP): Move(to=sidelined),
        (queued, Event.IGNORED): Move(to=State.DROPPED),
        (queued, Event.HOLD): Move(to=held),
        (held, Event.RELEASE): Move(to=queued, generation=1),
        (queued, Event.PULLED): Move(to=leased),
        (leased, Event.ACKED): Move(to=State.DELIVERED),
        (leased, Event.NACKED): Move(to=queued, generation=1, attempt=1),
        (leased, Event.NACKED_LATER): Move(to=State.SCHEDULED, generation=1, attempt=1),
        (leased, Event.LEASE_ENDED): Move(to=queued, generation=1, attempt=1),
        (leased, Event.RECEIVES_SPENT): Move(to=sidelined, generation=1, attempt=1),
        (queued, Event.HAND_OVER): Move(to=State.HANDED_OVER),
        (State.HANDED_OVER, Event.REJECTED): Move(to=sidelined),
        (sidelined, Event.SHOVEL): Move(to=queued, generation=1, attempt=None),
        (sidelined, Event.PURGE): Move(to=State.PURGED),
    }
    for state in UNFINISHED:
        table[state, Event.EXPIRE] = Move(to=State.EXPIRED)
        table[state, Event.CANCEL] = Move(to=State.CANCELLED)
    # A sidelined delivery is at rest, but the deletion of its subscription cancels it all the same.
    table[sidelined, Event.CANCEL] = Move(to=State.CANCELLED)
    table[sidelined, Event.EXPIRE] = Move(to=State.EXPIRED)
    for state in (State.EXPIRED, State.CANCELLED, State.DROPPED):
        table[state, Event.RESTORE] = Move(to=queued, generation=1, attempt=None)
    for state in (State.SCHEDULED, queued):
        table[state, Event.REFRESH] = Move(to=queued, generation=1)
        table[state, Event.REFRESH_LATER] = Move(to=State.SCHEDULED, generation=1)
    table[held, Event.REFRESH] = Move(to=held, generation=1)
    for state in (State.SCHEDULED, queued, held, sidelined):
        table[state, Event.LATE_SUCCESS] = Move(to=State.DELIVERED)
    return table


MOVES: Final = MappingProxyType(_table())


def move(state: State | None, event: Event) -> Move | None:
    """What `event` does to a delivery in `state` (None: not born yet); None where it is not allowed."""
    return MOVES.get((state, event))


def sources(event: Event) -> frozenset[State]:
    """The states from which `event` is allowed."""
    return frozenset(state for state, happened in MOVES if happened is event and state is not None)
