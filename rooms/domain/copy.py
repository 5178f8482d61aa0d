"""A copy of a delivery on its way: what a broker carries and a worker attempts."""

from dataclasses import dataclass
from typing import Final

from rooms.domain.ids import DeliveryId, MessageId, RoomId, SubscriptionId
from rooms.domain.states import SubscriptionType

PRIORITIES: Final = 10
"""From 0, which goes last, to 9, which goes first."""


@dataclass(slots=True)
class Copy:
    """One copy. (generation, attempt) say which step of its delivery it stands for; they are copies of the row's.

    Not frozen, because a worker makes hundreds of thousands a minute and a frozen dataclass costs three times as
    much to make; nobody changes one but the claim that makes it say what its row says. Not by keyword alone, because who
    makes it of a row or a frame that has all fields does so at a quarter of the price.
    """

    room_id: RoomId
    delivery_id: DeliveryId
    message_id: MessageId
    subscription_id: SubscriptionId
    kind: SubscriptionType
    generation: int
    attempt: int
    delay_ms: int
    """The wait that led to this attempt (0 on the first)."""
    priority: int
    event_type: str
    event_version: int
    correlation_id: str
    published_ms: int
    expires_ms: int | None
    """On this process's clock, whatever PostgreSQL's says: the adapter translates. None: never."""
    subscription_version: int | None
    """The version of the subscription's settings when the copy was taken; None where it is gone."""
    deadline: float
    """Until when (monotonic seconds) the claim is ours for certain; infinite where the broker's own rules decide."""
    headers: bytes | None
    """The publisher's own headers, a JSON object of strings."""
    payload: bytes
    abandoned: int = 0
    """How many claims running ended with whoever had it, and without an outcome: such a copy may have killed them."""
    native: bool = False
    """Clients of the broker's own read it: it is sent with what they need, too. Only the relay's claim says so."""

    @property
    def dedup_id(self) -> str:
        """The name of this step: sending it twice is harmless."""
        return f"{self.delivery_id}:{self.generation}:{self.attempt}"
