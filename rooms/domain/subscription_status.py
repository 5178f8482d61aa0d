"""Decide the status of a subscription from what its subscriber and its room's owner did.

The subscriber has a status of its own: active, paused or disabled. Above it stand reasons to
suspend: the room's owner, a lost grant, a suspended organisation. While there is one of them the
effective status is `suspended`, and deliveries are held as when paused. The stored status is always
the effective one, so that no statement needs to know the reasons.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from rooms.domain.state_machine import ENDED_STATUSES, SubscriptionStatus


class Suspension(StrEnum):
    """Name who or what suspends a subscription."""

    OWNER = "owner"
    GRANT = "grant"
    """The subscriber's grant ended."""
    SUBSCRIBER_ORGANISATION = "subscriber_organisation"
    """The subscriber's organisation is suspended."""
    OWNER_ORGANISATION = "owner_organisation"
    """The organisation of the room is suspended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Hold the effective status, the subscriber's own below it, and the reasons to suspend.

    `own` is None unless the effective status hides it.
    """

    status: SubscriptionStatus
    own: SubscriptionStatus | None = None
    suspended_by: frozenset[Suspension] = frozenset()


def suspend(standing: Standing, reason: Suspension) -> Standing:
    """Add a reason. A pending subscription keeps its status, an ended one changes no more."""
    if standing.status in ENDED_STATUSES:
        return standing
    return _effective(standing, standing.suspended_by | {reason})


def lift(standing: Standing, reasons: Iterable[Suspension]) -> Standing:
    """Remove reasons; without any left, the subscriber's own status applies again."""
    if standing.status in ENDED_STATUSES:
        return standing
    return _effective(standing, standing.suspended_by - set(reasons))


def set_own(standing: Standing, own: SubscriptionStatus) -> Standing:
    """Set the subscriber's own status, which shows once nothing suspends the subscription.

    ValueError: it is pending or has ended.
    """
    if standing.status is SubscriptionStatus.PENDING or standing.status in ENDED_STATUSES:
        raise ValueError(f"it is {standing.status}")
    if standing.status is SubscriptionStatus.SUSPENDED:
        return replace(standing, own=own)
    return replace(standing, status=own)


def approve(standing: Standing) -> Standing:
    """Activate a pending subscription, or leave it suspended. ValueError: it is not pending."""
    if standing.status is not SubscriptionStatus.PENDING:
        raise ValueError(f"it is {standing.status}")
    return _effective(replace(standing, status=SubscriptionStatus.ACTIVE), standing.suspended_by)


def end(standing: Standing, status: SubscriptionStatus) -> Standing:
    """Reject or terminate for good. ValueError: it has ended, or was approved (reject)."""
    rejects_approved = (
        status is SubscriptionStatus.REJECTED and standing.status is not SubscriptionStatus.PENDING
    )
    if standing.status in ENDED_STATUSES or rejects_approved:
        raise ValueError(f"it is {standing.status}")
    return Standing(status=status)


def _effective(standing: Standing, reasons: frozenset[Suspension]) -> Standing:
    if standing.status is SubscriptionStatus.PENDING:
        return replace(standing, suspended_by=reasons)
    own = standing.own or standing.status
    if reasons:
        return Standing(status=SubscriptionStatus.SUSPENDED, own=own, suspended_by=reasons)
    return Standing(status=own)
