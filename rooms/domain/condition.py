"""How a subscription does, in one word, told from what waits and rests there and from when it last got something."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from rooms.domain.states import SubscriptionStatus

BEHIND_AFTER: Final = timedelta(minutes=1)
"""What has been due for longer is late."""


class Condition(StrEnum):
    """The worst first."""

    DISABLED = "disabled"
    CIRCUIT_OPEN = "circuit_open"
    FAILING = "failing"
    """Nothing was delivered since the failures began, or nothing can be."""
    UNSTEADY = "unsteady"
    """Some fail and wait for their retry, others are delivered."""
    PAUSED = "paused"
    BEHIND = "behind"
    """What is due has waited for more than a minute: a slow endpoint, a set rate, or nobody pulls."""
    RESTING = "resting"
    """It does well, and there is something in its sideline."""


TROUBLED: Final = frozenset({Condition.DISABLED, Condition.CIRCUIT_OPEN, Condition.FAILING, Condition.UNSTEADY})
"""In these something fails now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptoms:
    """What is known of a subscription; None: there is no such thing."""

    status: SubscriptionStatus
    status_since: datetime
    unserved: bool = False
    """It is active, and its deliveries are held because of what `status_reason` says."""
    circuit_open_since: datetime | None = None
    only_failures_since: datetime | None = None
    """As workers say, where they watch for it."""
    retries_from: datetime | None = None
    """When the oldest of what is tried again was published, or due."""
    retries_to: datetime | None = None
    """The same of the newest."""
    sidelined_from: datetime | None = None
    """When the oldest of the sideline was put there."""
    sidelined_again: datetime | None = None
    """When the first of it was put there after `delivered_at`."""
    delivered_at: datetime | None = None
    waits_from: datetime | None = None
    """Since when the oldest waits that is due, or that a busy lane could not keep."""


def judge(of: Symptoms, now: datetime) -> tuple[Condition, datetime]:
    """The word, and since when it is so."""
    if of.status is SubscriptionStatus.DISABLED:
        return Condition.DISABLED, of.only_failures_since or of.status_since
    if of.status is SubscriptionStatus.PAUSED:
        return Condition.PAUSED, of.status_since
    if of.circuit_open_since is not None:
        return Condition.CIRCUIT_OPEN, of.only_failures_since or of.circuit_open_since
    if of.only_failures_since is not None:
        return Condition.FAILING, of.only_failures_since
    if of.unserved:
        return Condition.FAILING, of.waits_from or of.status_since
    well_at = of.delivered_at
    if of.retries_from is not None and of.retries_to is not None:
        if well_at is not None and well_at >= of.retries_to:
            return Condition.UNSTEADY, of.retries_from
        began = min(of.retries_from, of.sidelined_again or of.retries_from)
        # What was published before the last success can have failed only after it.
        return Condition.FAILING, began if well_at is None else max(began, well_at)
    if of.sidelined_again is not None:
        return Condition.FAILING, of.sidelined_again
    if of.waits_from is not None and now - of.waits_from > BEHIND_AFTER:
        return Condition.BEHIND, of.waits_from
    return Condition.RESTING, of.sidelined_from or of.status_since
