"""Magazines as records of a key-value store: sets, keys and bins, the same as IgnisMQ's where it has them (rows C2, C3).

Bin names have 15 characters at most.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from rooms.domain.magazine import Entry, HandlerQueue, MagazineName, Slot, Stored, queue_of

Bins = Mapping[str, Any]
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

# A slot's record: {client}_data_set, key {name}_SHARD_{shard}_{pointer}.
ID, BODY, GENERATION, SHOVELS = "id", "body", "generation", "shovels"
REASON, DETAIL, EXPIRES_AT, LOAD_TS, FIRE_TS = "reason", "detail", "expiresAt", "loadTS", "fireTS"
LOADED_BY, FIRED_BY = "loadedBy", "firedBy"
"""Which call wrote, and which stamped it: a call that is repeated in doubt knows its own."""
GONE: Final = "gone"
"""There when nothing is alive in the slot: which call deleted it, or HOLE."""
SWEPT: Final = "swept"
HOLE: Final = "hole"
STORED_BINS: Final = (ID, BODY, GENERATION, SHOVELS, REASON, DETAIL, EXPIRES_AT, LOAD_TS, FIRE_TS)
LIFE_BINS: Final = (GONE, SWEPT, LOAD_TS, FIRE_TS)
BODY_BINS: Final = (BODY, REASON, DETAIL)
"""What a slot that is done does not keep."""

# A shard's pointers: {client}_meta_set, key {name}_SHARD_{shard}.
LOAD_POINTER, FIRE_POINTER = "loadPointer", "firePointer"
LOADED, FIRED, DELETED, RELOADED = "loadCounter", "fireCounter", "deleteCounter", "reloadCounter"

# A queue: {farm}_{client}_ignis_queues, key the queue's name; of a subscription it has the sideline's sweep bins alone.
HANDLER_TYPE, SHARDS, ACTIVE, CREATED_AT = "handlerType", "shards", "active", "createdAt"
_NUMBERS: Final = {
    "queueExpiry": "queue_expiry_s",
    "messageExpiry": "message_expiry_s",
    "concurrency": "concurrency",
    "shovelConcur": "shovel_concurrency",
    "shovelInterval": "shovel_interval_s",
    SHARDS: "shards",
    "maxBatchSize": "max_batch",
    "maxWaitTime": "max_wait_s",
}
_OR_NEVER: Final = ("queueExpiry", "messageExpiry")
SWEEP_DURATION: Final = "sweepDuration"
QUEUE_BINS: Final = (HANDLER_TYPE, CREATED_AT, ACTIVE, SWEEP_DURATION, *_NUMBERS)


@dataclass(frozen=True, slots=True)
class SweepBins:
    """The bins of a queue's record that belong to one of its magazines."""

    pointers: str
    """By shard (as text) how far it is swept. It is there as long as the magazine."""
    epochs: str
    """By shard the last epoch under which it was swept."""
    counter: str
    expires: str


_MAIN: Final = SweepBins("sweepPointers", "sweepEpochs", "sweptCounter", "expires")
_SIDELINE: Final = SweepBins("sidelineSweep", "sidelineEpochs", "sidelineSwept", "sidelineExpires")


def sweep_bins(name: MagazineName) -> SweepBins:
    """Which of the two it is."""
    return _SIDELINE if queue_of(name)[1] else _MAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The sets of one installation, and the keys in them."""

    namespace: str
    farm: str
    client: str

    @property
    def queues(self) -> str:
        return f"{self.farm}_{self.client}_ignis_queues"

    @property
    def index(self) -> str:
        """The secondary index on `active`."""
        return f"{self.queues}_{ACTIVE}"

    def queue(self, queue: str) -> tuple[str, str, str]:
        return self.namespace, self.queues, queue

    def slot(self, name: MagazineName, slot: Slot) -> tuple[str, str, str]:
        return self.namespace, f"{self.client}_data_set", f"{name}_SHARD_{slot.shard}_{slot.pointer}"

    def meta(self, name: MagazineName, shard: int) -> tuple[str, str, str]:
        return self.namespace, f"{self.client}_meta_set", f"{name}_SHARD_{shard}"


def _ms(time: datetime) -> int:
    # Down, as clocks do: rounded up, an expiry would be a millisecond, and so a second, further off than it was said.
    return (time - _EPOCH) // timedelta(milliseconds=1)


def _time(ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=ms)


def entry_bins(entry: Entry, now_ms: int, call: str) -> dict[str, Any]:
    """A slot's bins as they are loaded; what an entry does not have takes no bin."""
    seldom = {
        GENERATION: entry.generation,
        SHOVELS: entry.shovels,
        REASON: entry.reason,
        DETAIL: entry.detail,
        EXPIRES_AT: entry.expires_at and _ms(entry.expires_at),
    }
    return {ID: entry.id, BODY: entry.body, LOAD_TS: now_ms, LOADED_BY: call} | {
        name: value for name, value in seldom.items() if value
    }


def lifetime_s(entry: Entry, now_ms: int) -> int | None:
    """Whole seconds until the entry expires, one at least; None: never."""
    if entry.expires_at is None:
        return None
    return max(1, math.ceil((_ms(entry.expires_at) - now_ms) / 1000))


def stored(slot: Slot, bins: Bins) -> Stored:
    """What stands in a slot."""
    expires, fired = bins.get(EXPIRES_AT), bins.get(FIRE_TS)
    return Stored(
        slot=slot,
        entry=Entry(
            id=bins[ID],
            body=bytes(bins.get(BODY) or b""),
            generation=bins.get(GENERATION) or 0,
            shovels=bins.get(SHOVELS) or 0,
            reason=bins.get(REASON),
            detail=bins.get(DETAIL),
            expires_at=None if expires is None else _time(expires),
        ),
        loaded_at=_time(bins[LOAD_TS]),
        fire_ts=None if fired is None else _time(fired),
    )


def queue_bins(queue: HandlerQueue) -> dict[str, Any]:
    """A handler queue's bins, those of the seed's table; what never ends is 0."""
    bins = {name: getattr(queue, field) or 0 for name, field in _NUMBERS.items()}
    return bins | {
        HANDLER_TYPE: queue.handler_type,
        CREATED_AT: _ms(queue.created_at),
        ACTIVE: "true" if queue.active else "false",
        SWEEP_DURATION: queue.sweep_duration_s * 1000,
    }


def handler_queue(name: str, bins: Bins) -> HandlerQueue:
    """`queue_bins`, read back."""
    numbers = {field: bins[bin_name] for bin_name, field in _NUMBERS.items()}
    for bin_name in _OR_NEVER:
        numbers[_NUMBERS[bin_name]] = bins[bin_name] or None
    return HandlerQueue(
        name=name,
        handler_type=bins[HANDLER_TYPE],
        created_at=_time(bins[CREATED_AT]),
        active=bins[ACTIVE] == "true",
        sweep_duration_s=bins[SWEEP_DURATION] // 1000,
        **numbers,
    )


def by_shard(slots: Sequence[Slot]) -> dict[int, int]:
    """How many of these slots each shard has."""
    counts: dict[int, int] = {}
    for slot in slots:
        counts[slot.shard] = counts.get(slot.shard, 0) + 1
    return counts
