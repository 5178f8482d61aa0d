"""The status of a subscription under the acts of its subscriber and of its room's owner."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.domain.state_machine import ENDED_STATUSES, SubscriptionStatus
from rooms.domain.subscription_status import (
    Standing,
    Suspension,
    approve,
    end,
    lift,
    set_own,
    suspend,
)

ACTIVE, PENDING = SubscriptionStatus.ACTIVE, SubscriptionStatus.PENDING
_OWN = (ACTIVE, SubscriptionStatus.PAUSED, SubscriptionStatus.DISABLED)
_steps: st.SearchStrategy[Callable[[Standing], Standing]] = st.one_of(
    st.sampled_from(Suspension).map(lambda reason: lambda now: suspend(now, reason)),
    st.sampled_from(Suspension).map(lambda reason: lambda now: lift(now, [reason])),
    st.sampled_from(_OWN).map(lambda own: lambda now: set_own(now, own)),
    st.just(approve),
    st.sampled_from([SubscriptionStatus.REJECTED, SubscriptionStatus.TERMINATED]).map(
        lambda status: lambda now: end(now, status)
    ),
)


def apply(standing: Standing, step: Callable[[Standing], Standing]) -> Standing:
    try:
        return step(standing)
    except ValueError:
        return standing


@given(st.sampled_from([PENDING, ACTIVE]), st.lists(_steps, max_size=12))
def test_every_sequence_keeps_the_invariants(
    first: SubscriptionStatus, steps: list[Callable[[Standing], Standing]]
) -> None:
    standing, approved = Standing(status=first), first is ACTIVE
    for step in steps:
        before, standing = standing, apply(standing, step)
        approved = approved or (step is approve and before.status is PENDING)
        assert before.status not in ENDED_STATUSES or standing == before
        if standing.status in (*_OWN, SubscriptionStatus.SUSPENDED):
            assert approved
        suspended = standing.status is SubscriptionStatus.SUSPENDED
        assert suspended == (standing.own is not None)
        assert bool(standing.suspended_by) <= (suspended or standing.status is PENDING)


def test_a_suspension_keeps_what_the_subscriber_did() -> None:
    paused = Standing(status=SubscriptionStatus.PAUSED)
    both = suspend(suspend(paused, Suspension.OWNER), Suspension.GRANT)
    assert both.status is SubscriptionStatus.SUSPENDED
    assert lift(both, [Suspension.OWNER]).status is SubscriptionStatus.SUSPENDED
    assert lift(both, [Suspension.OWNER, Suspension.GRANT]) == paused
    resumed = set_own(both, ACTIVE)
    assert resumed.status is SubscriptionStatus.SUSPENDED
    assert lift(resumed, Suspension) == Standing(status=ACTIVE)


def test_an_approval_under_a_suspension_waits_for_its_end() -> None:
    waiting = suspend(Standing(status=PENDING), Suspension.SUBSCRIBER_ORGANISATION)
    assert waiting.status is PENDING
    approved = approve(waiting)
    assert approved.status is SubscriptionStatus.SUSPENDED
    assert lift(approved, Suspension).status is ACTIVE


@pytest.mark.parametrize("status", sorted(ENDED_STATUSES))
def test_an_ended_subscription_changes_no_more(status: SubscriptionStatus) -> None:
    ended = Standing(status=status)
    assert suspend(ended, Suspension.OWNER) == ended
    for step in (approve, lambda now: end(now, SubscriptionStatus.TERMINATED)):
        with pytest.raises(ValueError, match=status):
            step(ended)
    with pytest.raises(ValueError, match=status):
        set_own(ended, ACTIVE)


def test_only_a_pending_subscription_is_rejected() -> None:
    with pytest.raises(ValueError, match="active"):
        end(Standing(status=ACTIVE), SubscriptionStatus.REJECTED)
