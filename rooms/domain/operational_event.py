"""Name the operational events: what happens to subscriptions, endpoints and deliveries of a room.

The room's owner receives those of the whole room. Another organisation receives those about its own
subscriptions, except `MESSAGE_COMPLETED`.
"""

from enum import StrEnum
from typing import Final


class OperationalEvent(StrEnum):
    """Name an event as operational subscriptions receive it."""

    SUBSCRIPTION_PENDING = "rooms.subscription.pending"
    """A subscription of another organisation, or a change of it, waits for approval."""
    SUBSCRIPTION_APPROVED = "rooms.subscription.approved"
    SUBSCRIPTION_REJECTED = "rooms.subscription.rejected"
    SUBSCRIPTION_SUSPENDED = "rooms.subscription.suspended"
    SUBSCRIPTION_REINSTATED = "rooms.subscription.reinstated"
    SUBSCRIPTION_TERMINATED = "rooms.subscription.terminated"
    """It was terminated by either side, or deleted by its subscriber."""
    ENDPOINT_DISABLED = "rooms.endpoint.disabled"
    ENDPOINT_RECOVERED = "rooms.endpoint.recovered"
    """It succeeded after it had only failed, or it was disabled and is resumed."""
    CIRCUIT_OPENED = "rooms.circuit.opened"
    CIRCUIT_CLOSED = "rooms.circuit.closed"
    DELIVERY_SIDELINED = "rooms.delivery.sidelined"
    MESSAGE_COMPLETED = "rooms.message.completed"
    """Every delivery that its publish made has ended or is sidelined, for the first time."""


SUBSCRIPTION_EVENTS: Final = frozenset(
    event for event in OperationalEvent if event.value.startswith("rooms.subscription.")
)
DEFAULT_OPERATIONAL_EVENTS: Final = SUBSCRIPTION_EVENTS | {OperationalEvent.ENDPOINT_DISABLED}
"""The events that a room sends unless it names others; the column has the same default."""
