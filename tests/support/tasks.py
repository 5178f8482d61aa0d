"""Delivery tasks with nothing special about them."""

from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId, MessageId, RoomId, SubscriptionId
from rooms.domain.state_machine import SubscriptionType


def make_task(
    subscription: str,
    kind: SubscriptionType = SubscriptionType.PUSH,
    *,
    priority: int = 4,
    room: int = 1,
) -> DeliveryTask:
    """Return a task of a subscription."""
    return DeliveryTask(
        room_id=RoomId(room),
        delivery_id=DeliveryId("d"),
        message_id=MessageId("m"),
        subscription_id=SubscriptionId(subscription),
        kind=kind,
        generation=0,
        attempt=0,
        delay_ms=0,
        priority=priority,
        event_type="made",
        event_version=1,
        correlation_id="c",
        published_ms=0,
        expires_ms=None,
        subscription_version=1,
        deadline=0.0,
        headers=None,
        payload=b"",
    )
