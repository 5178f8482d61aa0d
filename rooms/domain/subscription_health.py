"""Classify the health of a subscription from its waiting, failing and sidelined deliveries."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from rooms.domain.state_machine import SubscriptionStatus

LAGGING_AFTER: Final = timedelta(minutes=1)
"""Deliveries that have been due for longer are late."""


class SubscriptionHealth(StrEnum):
    """Name the health of a subscription, from worst to best."""

    DISABLED = "disabled"
    CIRCUIT_OPEN = "circuit_open"
    FAILING = "failing"
    """Nothing was delivered since the failures began, or can be."""
    DEGRADED = "unsteady"
    """Some deliveries fail and wait for a retry, others succeed."""
    PAUSED = "paused"
    LAGGING = "behind"
    """Deliveries have been due for over a minute: slow endpoint, rate limit, or no consumer."""
    HAS_SIDELINED = "resting"
    """It is healthy, and its sideline is not empty."""


UNHEALTHY: Final = frozenset(
    {
        SubscriptionHealth.DISABLED,
        SubscriptionHealth.CIRCUIT_OPEN,
        SubscriptionHealth.FAILING,
        SubscriptionHealth.DEGRADED,
    }
)
"""Health values with current failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthInput:
    """Hold the observations of a subscription; None: not observed."""

    status: SubscriptionStatus
    status_since: datetime
    held_for_reason: bool = False
    """It is active, but its deliveries are held for the reason in `status_reason`."""
    circuit_open_since: datetime | None = None
    only_failures_since: datetime | None = None
    """Reported by workers that observe it."""
    oldest_retry_at: datetime | None = None
    """Time when the oldest delivery that waits for a retry was published, or due."""
    newest_retry_at: datetime | None = None
    """The same for the newest."""
    oldest_sidelined_at: datetime | None = None
    """Time when the oldest delivery of the sideline was sidelined."""
    residelined_at: datetime | None = None
    """Time of the first sidelining after `delivered_at`."""
    delivered_at: datetime | None = None
    waiting_since: datetime | None = None
    """Time since which the oldest due delivery waits."""


def classify(health: HealthInput, now: datetime) -> tuple[SubscriptionHealth, datetime]:
    """Return the health, and the time since which it holds."""
    if health.status is SubscriptionStatus.DISABLED:
        return SubscriptionHealth.DISABLED, health.only_failures_since or health.status_since
    if health.status is SubscriptionStatus.PAUSED:
        return SubscriptionHealth.PAUSED, health.status_since
    if health.circuit_open_since is not None:
        return (
            SubscriptionHealth.CIRCUIT_OPEN,
            health.only_failures_since or health.circuit_open_since,
        )
    if health.only_failures_since is not None:
        return SubscriptionHealth.FAILING, health.only_failures_since
    if health.held_for_reason:
        return SubscriptionHealth.FAILING, health.waiting_since or health.status_since
    well_at = health.delivered_at
    if health.oldest_retry_at is not None and health.newest_retry_at is not None:
        if well_at is not None and well_at >= health.newest_retry_at:
            return SubscriptionHealth.DEGRADED, health.oldest_retry_at
        began = min(health.oldest_retry_at, health.residelined_at or health.oldest_retry_at)
        # A delivery published before the last success can only have failed after it.
        return SubscriptionHealth.FAILING, began if well_at is None else max(began, well_at)
    if health.residelined_at is not None:
        return SubscriptionHealth.FAILING, health.residelined_at
    if health.waiting_since is not None and now - health.waiting_since > LAGGING_AFTER:
        return SubscriptionHealth.LAGGING, health.waiting_since
    return SubscriptionHealth.HAS_SIDELINED, health.oldest_sidelined_at or health.status_since
