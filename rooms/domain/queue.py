"""Handler queues: for consumers in Python processes, with a main magazine and a sideline."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from rooms.domain.ids import OrganisationId
from rooms.domain.magazine import DEFAULT_SHARDS, HandlerQueue

MAX_SHOVELS: Final = 3
"""How often a message may come back from the sideline before only a person brings it back."""
SWEEP_S: Final = 1200
SHOVEL_S: Final = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class ShovelPlan:
    """How what was sidelined comes back (rows B4, B5)."""

    interval_s: int = SHOVEL_S
    concurrency: int = 4
    """Batches under way at a time."""
    one_shot: bool = False
    """One pass, and then no shovel any more."""
    max_shovels: int = MAX_SHOVELS
    """Messages that came back so often stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How many messages one call of a handler gets, and how long the first of them waits for the others (row B10)."""

    max_size: int
    max_wait_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """What its organisation decides about a queue."""

    shards: int = DEFAULT_SHARDS
    concurrency: int = 1
    message_expiry_s: int | None = None
    queue_expiry_s: int | None = None
    sweep_duration_s: int = SWEEP_S
    shovel: ShovelPlan | None = ShovelPlan()
    batching: Batching | None = None


def new_store_name(new_id: str) -> str:
    """Return the name in the store of a new queue; ids are random, so that no organisation can choose or take one."""
    return f"queue-{new_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A handler queue. `active`: its expiry has not passed.

    `name` is its organisation's, which has one queue of it. `store_name` is one in the installation and never changes: it
    names the queue's magazines in their store, its jobs and signals, and the queue in metrics and logs.
    """

    name: str
    store_name: str
    organisation_id: OrganisationId
    settings: QueueSettings
    active: bool
    created_at: datetime
    updated_at: datetime

    @property
    def stuck_s(self) -> int:
        """So long after it was handed out an entry of the main magazine is stuck."""
        return self.settings.sweep_duration_s

    @property
    def sideline_stuck_s(self) -> int:
        """The same in the sideline: at least two intervals of the shovel, which may have it still (row B6)."""
        plan = self.settings.shovel
        return self.stuck_s if plan is None else max(self.stuck_s, 2 * plan.interval_s)

    def expires_at(self, now: datetime) -> datetime | None:
        """When a message of now ends."""
        expiry_s = self.settings.message_expiry_s
        return None if expiry_s is None else now + timedelta(seconds=expiry_s)

    def over(self, now: datetime) -> bool:
        """Whether it expired so long ago that nothing of it is kept (row C7: twice its expiry)."""
        expiry_s = self.settings.queue_expiry_s
        return expiry_s is not None and now >= self.created_at + timedelta(seconds=3 * expiry_s)

    def record(self) -> HandlerQueue:
        """What the magazines' store keeps of it (row C2)."""
        settings = self.settings
        plan, batching = settings.shovel, settings.batching
        return HandlerQueue(
            name=self.store_name,
            handler_type="python",
            created_at=self.created_at,
            active=self.active,
            shards=settings.shards,
            queue_expiry_s=settings.queue_expiry_s,
            message_expiry_s=settings.message_expiry_s,
            concurrency=settings.concurrency,
            shovel_concurrency=0 if plan is None else plan.concurrency,
            shovel_interval_s=0 if plan is None else plan.interval_s,
            sweep_duration_s=settings.sweep_duration_s,
            max_batch=0 if batching is None else batching.max_size,
            max_wait_s=0 if batching is None else -(-batching.max_wait_ms // 1000),
        )
