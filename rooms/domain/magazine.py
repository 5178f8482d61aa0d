"""Define magazines: sharded stores of entries that are loaded at one end and fired at the other.

A shard is a sequence of slots numbered from 0. The load pointer is the next slot to load, and the
fire pointer the next to fire. Below the sweep pointer all entries are gone:

    0 ── done ── sweep pointer ── fired, in progress ── fire pointer ── waiting ── load pointer
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NewType

MagazineName = NewType("MagazineName", str)

DEFAULT_SHARDS: Final = 32
MAX_SHARDS: Final = 512
SIDELINE_SUFFIX: Final = "_SIDELINE"
MAX_CONSUMERS: Final = 100
MAX_BATCH: Final = 1000
"""Most entries of one call, and most slots of one sweep."""
MAX_BATCH_BYTES: Final = 4 * 1024 * 1024
"""Bytes of bodies after which a call hands out no further entry: any may have a mebibyte."""
_QUEUE_NAME: Final = re.compile(r"[a-zA-Z0-9_.\-]{1,128}")


def main_magazine_name(queue: str) -> MagazineName:
    """Return the main magazine of a handler queue. ValueError: the name is invalid."""
    if not _QUEUE_NAME.fullmatch(queue) or queue.endswith(SIDELINE_SUFFIX):
        raise ValueError(
            "a queue's name is 1 to 128 of a-z, A-Z, 0-9, '_', '.' and '-',"
            f" and does not end with {SIDELINE_SUFFIX}"
        )
    return MagazineName(queue)


def sideline_name(queue: str) -> MagazineName:
    """Return the sideline of a handler queue, or (`subscription-{id}`) of a subscription."""
    return MagazineName(f"{main_magazine_name(queue)}{SIDELINE_SUFFIX}")


def queue_from_magazine(name: MagazineName) -> tuple[str, bool]:
    """Return the queue of a magazine, and whether the magazine is its sideline."""
    queue = name.removesuffix(SIDELINE_SUFFIX)
    return queue, queue != name


def check_shards(shards: int) -> int:
    """Return the number of shards. ValueError: it is out of range."""
    if not 1 <= shards <= MAX_SHARDS:
        raise ValueError(f"a magazine has 1 to {MAX_SHARDS} shards")
    return shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Hold an entry as it is loaded."""

    id: str
    """Chosen by the loader, and never changed."""
    body: bytes
    generation: int = 0
    """Generation of its delivery; 0: it has none."""
    shovels: int = 0
    """Times that it was shoveled from a sideline."""
    reason: str | None = None
    """Reason why it was sidelined."""
    detail: str | None = None
    expires_at: datetime | None = None
    """Time after which it is not handed out, if the magazine expires entries."""


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """Locate an entry. A slot is never used again."""

    shard: int
    pointer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEntry:
    """Hold an entry and its slot."""

    slot: Slot
    entry: Entry
    loaded_at: datetime
    fire_ts: datetime | None
    """Time when it was last handed out; None: it waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepBatch:
    """Hold the result of one sweep."""

    entries: Sequence[StoredEntry]
    pointer: int
    """The sweep pointer now."""
    is_full: bool
    """The sweep ended because it was full, not at the first entry that is not stuck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """Hold pointers and counters of one shard.

    The counters cover all entries since the magazine was created. Calls with an outcome in doubt
    make them inexact. `fired` includes entries that were taken by slot. Entries that expired are in
    no counter.
    """

    shard: int
    load_pointer: int
    fire_pointer: int
    sweep_pointer: int
    epoch: int
    loaded: int
    fired: int
    deleted: int
    reloaded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MagazineState:
    """Hold the counters of a magazine."""

    name: MagazineName
    shards: Sequence[ShardState]
    swept: int
    """Entries that a sweeper deleted; exact."""

    @property
    def depth(self) -> int:
        """Return the live entries by the counters. `Magazine.count` counts the slots."""
        return sum(shard.loaded - shard.deleted for shard in self.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerQueueRecord:
    """Describe a handler queue for the processes that serve it."""

    name: str
    handler_type: str
    created_at: datetime
    active: bool = True
    shards: int = DEFAULT_SHARDS
    queue_expiry_s: int | None = None
    """Time after which it is deactivated; None: never."""
    message_expiry_s: int | None = None
    concurrency: int = 1
    shovel_concurrency: int = 4
    shovel_interval_s: int = 600
    sweep_duration_s: int = 1200
    max_batch: int = 0
    """Most messages of one handler call; 0: one at a time."""
    max_wait_s: int = 0

    def __post_init__(self) -> None:
        main_magazine_name(self.name)
        check_shards(self.shards)
        if not 1 <= self.concurrency <= MAX_CONSUMERS:
            raise ValueError(f"a queue has 1 to {MAX_CONSUMERS} consumers")
