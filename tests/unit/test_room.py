"""The effective policy of a subscription."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.domain.room import Room, Subscription
from rooms.domain.states import SubscriptionStatus, SubscriptionType

NOW = datetime(2025, 6, 15, tzinfo=UTC)
ROOM = Room(
    id=RoomId(1), organisation_id=OrganisationId("o"), name="r", description=None, message_expiration_ms=1000,
    delivery_delay_ms=100, delivery_delay_multiplier=2.0, delivery_attempts=5, delivery_max_delay_ms=9000,
    delivery_jitter=0.25, plan_version=1, created_at=NOW, updated_at=NOW,
)  # fmt: skip
SUBSCRIPTION = Subscription(
    id=SubscriptionId("s"), room_id=RoomId(1), name="s", type=SubscriptionType.PUSH, event_types=None, push_url="u",
    delivery_delay_ms=None, delivery_delay_multiplier=None, delivery_attempts=None, timeout_ms=1, max_receives=None,
    cloud_events=False, status=SubscriptionStatus.ACTIVE, status_reason=None, status_since=NOW, version=7,
    terminal_statuses=frozenset({400}), ignorable_statuses=frozenset({409}), created_at=NOW, updated_at=NOW,
)  # fmt: skip


@pytest.mark.row("A3")
@given(
    delay=st.none() | st.integers(0, 10),
    multiplier=st.none() | st.sampled_from([0.0, 1.0, 3.5]),
    attempts=st.none() | st.integers(0, 3),
)
def test_each_override_stands_on_its_own(delay: int | None, multiplier: float | None, attempts: int | None) -> None:
    """Nought is a value like any other."""
    subscription = replace(
        SUBSCRIPTION, delivery_delay_ms=delay, delivery_delay_multiplier=multiplier, delivery_attempts=attempts
    )
    policy = subscription.policy(ROOM)
    assert policy.delay_ms == (100 if delay is None else delay)
    assert policy.multiplier == (2.0 if multiplier is None else multiplier)
    assert policy.attempts == (5 if attempts is None else attempts)
    assert (policy.max_delay_ms, policy.jitter, policy.version) == (9000, 0.25, 7)
    assert (policy.terminal_statuses, policy.ignorable_statuses) == (frozenset({400}), frozenset({409}))
