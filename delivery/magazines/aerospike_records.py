"""Map magazines onto records of a key-value store: sets, keys and bins, like those of IgnisMQ.

Bin names have 15 characters at most.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from rooms.domain.magazine import (
    Entry,
    HandlerQueueRecord,
    MagazineName,
    Slot,
    StoredEntry,
    queue_from_magazine,
)

Bins = Mapping[str, Any]
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

# A slot's record: {client}_data_set, key {name}_SHARD_{shard}_{pointer}.
ID, BODY, GENERATION, SHOVELS = "id", "body", "generation", "shovels"
REASON, DETAIL, EXPIRES_AT, LOAD_TS, FIRE_TS = "reason", "detail", "expiresAt", "loadTS", "fireTS"
LOADED_BY, FIRED_BY = "loadedBy", "firedBy"
"""Names of the calls that wrote and stamped it, so that a repeated call recognises its own."""
GONE: Final = "gone"
"""Set when the slot has no live entry: the name of the call that deleted it, or HOLE."""
SWEPT: Final = "swept"
HOLE: Final = "hole"
STORED_BINS: Final = (ID, BODY, GENERATION, SHOVELS, REASON, DETAIL, EXPIRES_AT, LOAD_TS, FIRE_TS)
STATE_BINS: Final = (GONE, SWEPT, LOAD_TS, FIRE_TS)
BODY_BINS: Final = (BODY, REASON, DETAIL)
"""Bins that a deleted slot does not keep."""

# A shard's pointers: {client}_meta_set, key {name}_SHARD_{shard}.
LOAD_POINTER, FIRE_POINTER = "loadPointer", "firePointer"
LOADED, FIRED, DELETED, RELOADED = "loadCounter", "fireCounter", "deleteCounter", "reloadCounter"

# A queue: {farm}_{client}_ignis_queues, key the queue's name. A subscription's record has only the
# sweep bins of its sideline.
HANDLER_TYPE, SHARDS, ACTIVE, CREATED_AT = "handlerType", "shards", "active", "createdAt"
_NUMBER_BINS: Final = {
    "queueExpiry": "queue_expiry_s",
    "messageExpiry": "message_expiry_s",
    "concurrency": "concurrency",
    "shovelConcur": "shovel_concurrency",
    "shovelInterval": "shovel_interval_s",
    SHARDS: "shards",
    "maxBatchSize": "max_batch",
    "maxWaitTime": "max_wait_s",
}
_OPTIONAL_EXPIRIES: Final = ("queueExpiry", "messageExpiry")
SWEEP_DURATION: Final = "sweepDuration"
QUEUE_BINS: Final = (HANDLER_TYPE, CREATED_AT, ACTIVE, SWEEP_DURATION, *_NUMBER_BINS)


@dataclass(frozen=True, slots=True)
class SweepBins:
    """Name the bins of a queue's record that belong to one of its magazines."""

    pointers: str
    """Sweep pointers by shard (as text). The bin exists as long as the magazine."""
    epochs: str
    """Epochs of the last sweep, by shard."""
    counter: str
    expires: str


_MAIN: Final = SweepBins("sweepPointers", "sweepEpochs", "sweptCounter", "expires")
_SIDELINE: Final = SweepBins("sidelineSweep", "sidelineEpochs", "sidelineSwept", "sidelineExpires")


def sweep_bins(name: MagazineName) -> SweepBins:
    """Return the bins of a main or a sideline magazine."""
    return _SIDELINE if queue_from_magazine(name)[1] else _MAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordKeys:
    """Name the sets of one installation, and the keys in them."""

    namespace: str
    farm: str
    client: str

    @property
    def queues(self) -> str:
        return f"{self.farm}_{self.client}_ignis_queues"

    @property
    def index(self) -> str:
        """Return the name of the secondary index on `active`."""
        return f"{self.queues}_{ACTIVE}"

    def queue(self, queue: str) -> tuple[str, str, str]:
        return self.namespace, self.queues, queue

    def slot(self, name: MagazineName, slot: Slot) -> tuple[str, str, str]:
        return (
            self.namespace,
            f"{self.client}_data_set",
            f"{name}_SHARD_{slot.shard}_{slot.pointer}",
        )

    def meta(self, name: MagazineName, shard: int) -> tuple[str, str, str]:
        return self.namespace, f"{self.client}_meta_set", f"{name}_SHARD_{shard}"


def _ms(time: datetime) -> int:
    # Round down: rounded up, an expiry would be a millisecond late, and so a second in whole
    # seconds.
    return (time - _EPOCH) // timedelta(milliseconds=1)


def to_time(ms: int) -> datetime:
    """Return a time that a bin has in milliseconds."""
    return _EPOCH + timedelta(milliseconds=ms)


def entry_bins(entry: Entry, now_ms: int, call: str) -> dict[str, Any]:
    """Return a slot's bins as they are loaded; empty fields take no bin."""
    optional = {
        GENERATION: entry.generation,
        SHOVELS: entry.shovels,
        REASON: entry.reason,
        DETAIL: entry.detail,
        EXPIRES_AT: entry.expires_at and _ms(entry.expires_at),
    }
    return {ID: entry.id, BODY: entry.body, LOAD_TS: now_ms, LOADED_BY: call} | {
        name: value for name, value in optional.items() if value
    }


def ttl_s(entry: Entry, now_ms: int) -> int | None:
    """Return whole seconds until the entry expires, at least one; None: never."""
    if entry.expires_at is None:
        return None
    return max(1, math.ceil((_ms(entry.expires_at) - now_ms) / 1000))


def to_stored_entry(slot: Slot, bins: Bins) -> StoredEntry:
    """Return the entry in a slot, from its bins."""
    expires, fired = bins.get(EXPIRES_AT), bins.get(FIRE_TS)
    return StoredEntry(
        slot=slot,
        entry=Entry(
            id=bins[ID],
            body=bytes(bins.get(BODY) or b""),
            generation=bins.get(GENERATION) or 0,
            shovels=bins.get(SHOVELS) or 0,
            reason=bins.get(REASON),
            detail=bins.get(DETAIL),
            expires_at=None if expires is None else to_time(expires),
        ),
        loaded_at=to_time(bins[LOAD_TS]),
        fire_ts=None if fired is None else to_time(fired),
    )


def queue_bins(queue: HandlerQueueRecord) -> dict[str, Any]:
    """Return a handler queue's bins; 0 stands for no expiry."""
    bins = {name: getattr(queue, field) or 0 for name, field in _NUMBER_BINS.items()}
    return bins | {
        HANDLER_TYPE: queue.handler_type,
        CREATED_AT: _ms(queue.created_at),
        ACTIVE: "true" if queue.active else "false",
        SWEEP_DURATION: queue.sweep_duration_s * 1000,
    }


def to_handler_queue(name: str, bins: Bins) -> HandlerQueueRecord:
    """Return the record that `queue_bins` wrote."""
    numbers = {field: bins[bin_name] for bin_name, field in _NUMBER_BINS.items()}
    for bin_name in _OPTIONAL_EXPIRIES:
        numbers[_NUMBER_BINS[bin_name]] = bins[bin_name] or None
    return HandlerQueueRecord(
        name=name,
        handler_type=bins[HANDLER_TYPE],
        created_at=to_time(bins[CREATED_AT]),
        active=bins[ACTIVE] == "true",
        sweep_duration_s=bins[SWEEP_DURATION] // 1000,
        **numbers,
    )


def count_by_shard(slots: Sequence[Slot]) -> dict[int, int]:
    """Return the number of these slots by shard."""
    counts: dict[int, int] = {}
    for slot in slots:
        counts[slot.shard] = counts.get(slot.shard, 0) + 1
    return counts
