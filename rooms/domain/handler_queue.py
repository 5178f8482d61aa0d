"""Define handler queues: for consumers in Python, with a main magazine and a sideline."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from rooms.domain.ids import OrganisationId
from rooms.domain.magazine import DEFAULT_SHARDS, HandlerQueueRecord

MAX_SHOVELS: Final = 3
"""Times that a message is shoveled automatically; after that only an operator shovels it."""
DEFAULT_SWEEP_S: Final = 1200
DEFAULT_SHOVEL_INTERVAL_S: Final = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class ShovelSettings:
    """Configure how sidelined messages are shoveled back."""

    interval_s: int = DEFAULT_SHOVEL_INTERVAL_S
    concurrency: int = 4
    """Concurrent batches."""
    one_shot: bool = False
    """Run one pass only."""
    max_shovels: int = MAX_SHOVELS
    """Messages that were shoveled so often stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """Set the most messages of a handler call, and how long the first waits for others."""

    max_size: int
    max_wait_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """Hold the settings that an organisation chooses for a queue."""

    shards: int = DEFAULT_SHARDS
    concurrency: int = 1
    message_expiry_s: int | None = None
    queue_expiry_s: int | None = None
    sweep_duration_s: int = DEFAULT_SWEEP_S
    shovel: ShovelSettings | None = ShovelSettings()
    batching: Batching | None = None


def new_store_name(new_id: str) -> str:
    """Return the store name of a new queue. Its random id keeps organisations from choosing one."""
    return f"queue-{new_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerQueue:
    """Describe a handler queue."""

    name: str
    """Unique in its organisation."""
    store_name: str
    """Unique in the installation. It names magazines, jobs and notifications, and never changes."""
    organisation_id: OrganisationId
    settings: QueueSettings
    active: bool
    """Its expiry has not passed."""
    created_at: datetime
    updated_at: datetime

    @property
    def stuck_after_s(self) -> int:
        """Return the time after which an entry that the main magazine handed out is stuck."""
        return self.settings.sweep_duration_s

    @property
    def sideline_stuck_after_s(self) -> int:
        """Return the same for the sideline: at least two intervals of the shovel."""
        plan = self.settings.shovel
        return self.stuck_after_s if plan is None else max(self.stuck_after_s, 2 * plan.interval_s)

    def expires_at(self, now: datetime) -> datetime | None:
        """Return when a message that is loaded now expires."""
        expiry_s = self.settings.message_expiry_s
        return None if expiry_s is None else now + timedelta(seconds=expiry_s)

    def is_purgeable(self, now: datetime) -> bool:
        """Return whether twice the expiry has passed since it expired, so nothing is kept."""
        expiry_s = self.settings.queue_expiry_s
        return expiry_s is not None and now >= self.created_at + timedelta(seconds=3 * expiry_s)

    def to_record(self) -> HandlerQueueRecord:
        """Return the record that the magazines' store keeps."""
        settings = self.settings
        plan, batching = settings.shovel, settings.batching
        return HandlerQueueRecord(
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
