"""Magazines: sharded stores of entries that are loaded at one end and fired at the other.

A shard is a row of slots numbered from 0. The load pointer is the next slot to load, the fire pointer the next to
fire, and below the sweep pointer nothing is alive any more:

    0 ──── done ──── sweep pointer ──── fired, being worked on ──── fire pointer ──── waiting ──── load pointer
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
"""Entries that one call may name or ask for; a sweep looks at so many slots at a time."""
_QUEUE_NAME: Final = re.compile(r"[a-zA-Z0-9_.\-]{1,128}")


def main_of(queue: str) -> MagazineName:
    """The main magazine of a handler queue. ValueError for a name that would be another queue's sideline."""
    if not _QUEUE_NAME.fullmatch(queue) or queue.endswith(SIDELINE_SUFFIX):
        raise ValueError(
            f"a queue's name is 1 to 128 of a-z, A-Z, 0-9, '_', '.' and '-', and does not end with {SIDELINE_SUFFIX}"
        )
    return MagazineName(queue)


def sideline_of(queue: str) -> MagazineName:
    """The sideline of a handler queue, or (`subscription-{id}`) of a subscription."""
    return MagazineName(f"{main_of(queue)}{SIDELINE_SUFFIX}")


def queue_of(name: MagazineName) -> tuple[str, bool]:
    """The queue whose magazine this is, and whether it is its sideline."""
    queue = name.removesuffix(SIDELINE_SUFFIX)
    return queue, queue != name


def check_shards(shards: int) -> int:
    """The number of shards, or ValueError."""
    if not 1 <= shards <= MAX_SHARDS:
        raise ValueError(f"a magazine has 1 to {MAX_SHARDS} shards")
    return shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is loaded. The id is its loader's and names the entry for ever; `generation` is that of the delivery it
    stands for (0 where there is none).
    """

    id: str
    body: bytes
    generation: int = 0
    shovels: int = 0
    """How often it was brought back from a sideline."""
    reason: str | None = None
    """Why it was sidelined."""
    detail: str | None = None
    expires_at: datetime | None = None
    """Where the magazine expires entries, it is not handed out after that; elsewhere it is only kept."""


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """Where an entry stands. A slot is never used again."""

    shard: int
    pointer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An entry in its slot."""

    slot: Slot
    entry: Entry
    loaded_at: datetime
    fire_ts: datetime | None
    """When it was last handed out; None: it waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What one look of a sweeper took."""

    taken: Sequence[Stored]
    pointer: int
    """The sweep pointer as it stands now."""
    more: bool
    """Whether the look ended because it was full, and not at the first entry that is not stuck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """Pointers and counters of one shard.

    The counters count entries since the magazine was made; where a store left an answer in doubt they may be off by
    what was in doubt. `fired` counts what was taken by choice too; what expired by itself is in no counter.
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
    """A magazine as its counters tell it."""

    name: MagazineName
    shards: Sequence[ShardState]
    swept: int
    """Entries that a sweeper deleted; exact."""

    @property
    def depth(self) -> int:
        """Live entries by the counters; `Magazine.count` counts the slots themselves."""
        return sum(shard.loaded - shard.deleted for shard in self.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerQueue:
    """A queue that handlers in Python processes work on: what every process that serves it has to know."""

    name: str
    handler_type: str
    created_at: datetime
    active: bool = True
    shards: int = DEFAULT_SHARDS
    queue_expiry_s: int | None = None
    """After so long it is deactivated; None: never."""
    message_expiry_s: int | None = None
    concurrency: int = 1
    shovel_concurrency: int = 4
    shovel_interval_s: int = 600
    sweep_duration_s: int = 1200
    max_batch: int = 0
    """Most messages for one call of a handler; 0: one at a time."""
    max_wait_s: int = 0

    def __post_init__(self) -> None:
        main_of(self.name)
        check_shards(self.shards)
        if not 1 <= self.concurrency <= MAX_CONSUMERS:
            raise ValueError(f"a queue has 1 to {MAX_CONSUMERS} consumers")
