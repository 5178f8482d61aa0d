"""Make random walks of deliveries through the transition table, and some illegal ones."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from delivery.analytics.runs.conformance import EVENTS_BY_KIND
from rooms.domain.state_machine import TRANSITIONS, Event, LogKind, State
from tests.support.sealed_segments import SCHEMA, START_S

_ATTEMPTED: Final = frozenset(
    {Event.SUCCEEDED, Event.FAILED, Event.FAILED_LATER, Event.GAVE_UP, Event.IGNORED}
)
_ROOM: Final = 77
_SUBSCRIPTION: Final = f"019b0000-0000-7003-8000-{_ROOM:012x}"
_KIND: Final = {
    event: kind
    for kind, events in EVENTS_BY_KIND.items()
    for event in events
    if kind is not LogKind.REPLAYED
}
Step = tuple[LogKind, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walks:
    """The rows of all walks, and the ids of illegal ones."""

    rows: pa.Table
    illegal: frozenset[str]
    count: int


def walk(rng: np.random.Generator, *, steps: int) -> list[Step]:
    """Return a legal walk: (kind, generation, attempt) of each row, in order."""
    state: State | None = None
    generation = attempt = 0
    before = (0, 0)
    path: list[Step] = []
    for _ in range(steps):
        events = [event for origin, event in TRANSITIONS if origin is state]
        if not events:
            break
        event = events[rng.integers(len(events))]
        moved = TRANSITIONS[state, event]
        if event in _ATTEMPTED:
            path.append((LogKind.ATTEMPTED, generation, attempt))
        at = (generation, attempt)
        generation += moved.generation
        attempt = 0 if moved.attempt is None else attempt + moved.attempt
        # A late success carries the step of its attempt, which may be an older one.
        carried = before if event is Event.LATE_SUCCESS else (generation, attempt)
        path.append((_KIND[event], *carried))
        before, state = at, moved.to
    return path


def wander(*, seed: int, legal: int, illegal: int, hours: int) -> Walks:
    """Make walks over some hours. Clocks are skewed, so only generations and attempts order the rows."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    wrong: set[str] = set()
    for number in range(legal + illegal):
        path = walk(rng, steps=int(rng.integers(1, 14)))
        identity = _identity(number, 1)
        if number >= legal:
            last = path[-1]
            # Held after its end, which no final state allows.
            path = [*path, (LogKind.DELIVERED, last[1] + 1, 0), (LogKind.PURGED, last[1] + 1, 0)]
            wrong.add(identity)
        rows += _rows(rng, number, identity, path, hours)
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    return Walks(rows=table, illegal=frozenset(wrong), count=legal + illegal)


def _identity(number: int, salt: int) -> str:
    text = f"{_halves(number, salt)[0]:016x}{_halves(number, salt)[1] & (2**64 - 1):016x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _halves(number: int, salt: int) -> tuple[int, int]:
    return (START_S * 1000) << 16 | 0x7000 | salt, -(1 << 63) | number << 32 | _ROOM


def _rows(
    rng: np.random.Generator, number: int, identity: str, path: list[Step], hours: int
) -> list[dict[str, Any]]:
    message, delivery = _halves(number, 0), _halves(number, 1)
    born = int(rng.integers(60, 1800))
    times = np.sort(rng.integers(born, hours * 3600 - 60, len(path))) + rng.integers(
        -20, 20, len(path)
    )
    shared = {
        "room_id": _ROOM, "message_id": _identity(number, 0), "message_hi": message[0], "message_lo": message[1],
        "writer_id": 900 + number, "schema_version": 1, "event_type": "walk", "event_version": 1,
    }  # fmt: skip
    published = {
        **shared,
        "kind": "published",
        "fanout": 1,
        "ts": (START_S + born) * 1_000_000,
        "writer_seq": 1,
        "xid": 1,
    }
    rows = [published]
    for place, (kind, generation, attempt) in enumerate(path):
        second = born if not place else int(max(times[place], born))
        rows.append(
            {
                **shared, "kind": kind.value, "ts": (START_S + second) * 1_000_000, "writer_seq": place + 2, "xid": place + 2,
                "subscription_id": _SUBSCRIPTION, "delivery_id": identity, "delivery_hi": delivery[0],
                "delivery_lo": delivery[1], "generation": generation, "attempt": attempt,
                "latency_ms": 5.0 if kind is LogKind.ATTEMPTED else None,
                "http_status": 200 if kind is LogKind.ATTEMPTED else None,
                "target_host": "walk.example" if kind is LogKind.ATTEMPTED else None,
            }
        )  # fmt: skip
    return rows
