"""Describe a delivery task: what a broker carries and a worker attempts."""

import math
from dataclasses import dataclass
from typing import Final

from rooms.domain.delivery_properties import DeliveryProperties
from rooms.domain.govstack import ItemEnvelope
from rooms.domain.ids import DeliveryId, MessageId, RoomId, SubscriptionId
from rooms.domain.state_machine import SubscriptionType

PRIORITIES: Final = 10
"""From 0, which is delivered last, to 9, which is delivered first."""
DEFAULT_PRIORITY: Final = 4
"""The priority of a message whose publisher gave none."""


@dataclass(slots=True)
class DeliveryTask:
    """Hold one attemptable unit of a delivery. (generation, attempt) are the version of its row.

    It is not frozen: a worker creates hundreds of thousands a minute, and frozen dataclasses cost
    three times as much to create. Only the claim changes one, to match its row, and the push
    worker, to set its envelope. It is not keyword-only: creating one from a row with all fields
    costs a quarter.
    """

    room_id: RoomId
    delivery_id: DeliveryId
    message_id: MessageId
    subscription_id: SubscriptionId
    kind: SubscriptionType
    generation: int
    attempt: int
    delay_ms: int
    """Delay before this attempt (0 before the first)."""
    priority: int
    event_type: str
    event_version: int
    correlation_id: str
    published_ms: int
    expires_ms: int | None
    """Expiry in epoch milliseconds; None: never."""
    subscription_version: int | None
    """Version of the subscription's settings at the claim; None: it was deleted."""
    deadline: float
    """Monotonic second until which the claim is valid; infinite: the broker's rules decide."""
    headers: bytes | None
    """Headers of the publisher, a JSON object of strings."""
    payload: bytes
    crash_count: int = 0
    """Claims in a row whose worker died, possibly because of this task."""
    properties: DeliveryProperties | None = None
    """None: it is of a plain message."""
    native: bool = False
    """Clients of the broker read it, and it is sent with what they need. Only the relay sets it."""
    behind: bool = False
    """It comes after others of its priority, as its organisation has a backlog. The relay sets it.
    """
    expires_at: float = math.inf
    """Monotonic second of the expiry, set by the claim: the time of day of a process may be set."""
    envelope: ItemEnvelope | None = None
    """None: the payload is sent as it is. A push worker sets it once it knows the subscription."""

    @property
    def dedup_id(self) -> str:
        """Return the id by which a broker recognises a repeated send."""
        return f"{self.delivery_id}:{self.generation}:{self.attempt}"
