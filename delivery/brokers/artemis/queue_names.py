"""Name the queues of an installation at the broker.

PULL queues are `room-{room}::subscription-{subscription}`, whatever the installation. The names of
all others contain its farm and client.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from delivery.brokers.artemis.frames import escape
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId, room_of
from rooms.domain.state_machine import SubscriptionType

PULL_PREFIX: Final = "subscription-"
_DEAD_LETTER_ADDRESS: Final = "rooms-dead-letters"
"""The dead-letter address of `rooms/local/broker.xml`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerQueue:
    """Name a queue by its fully qualified name."""

    address: str
    name: str
    routing: str
    """ANYCAST or MULTICAST."""

    @property
    def destination(self) -> str:
        return f"{self.address}::{self.name}"


@dataclass(frozen=True, slots=True)
class QueueNames:
    """Build the names of an installation's queues."""

    farm: str
    client: str

    @property
    def owner(self) -> str:
        """Return the owner of this installation's queues: PULL queue names do not name it."""
        return f"rooms {self.farm} {self.client}"

    @property
    def push(self) -> BrokerQueue:
        return self._installation_queue("push")

    @property
    def backlog(self) -> BrokerQueue:
        """Return the queue for PUSH copies that come behind others."""
        return self._installation_queue("backlog")

    @property
    def all_push(self) -> Sequence[BrokerQueue]:
        """Return what a worker reads, in the order of its subscriptions: the backlog is second."""
        return self.push, self.backlog

    @property
    def sentinel(self) -> BrokerQueue:
        return self._installation_queue("sentinel")

    @property
    def prepared_sentinels(self) -> BrokerQueue:
        """Return the queue for sentinels that do not count yet."""
        return self._installation_queue("prepared-sentinels")

    @property
    def durable_sentinel(self) -> BrokerQueue:
        """Return the queue that versions with durable copies have for their sentinel."""
        return self._installation_queue("rooms-marker")

    @property
    def dead_letters(self) -> BrokerQueue:
        """Return the queue for what readers of native queues reject.

        It also gets what readers of other installations reject.
        """
        return BrokerQueue(
            address=_DEAD_LETTER_ADDRESS,
            name=f"dead-letters-{self.farm}-{self.client}",
            routing="MULTICAST",
        )

    @property
    def reply_address(self) -> str:
        """Return the address of the management's replies."""
        return f"rooms-replies-{self.farm}-{self.client}"

    def _installation_queue(self, prefix: str) -> BrokerQueue:
        name = f"{prefix}-{self.farm}-{self.client}"
        return BrokerQueue(address=name, name=name, routing="ANYCAST")

    def pull(self, subscription: SubscriptionId) -> BrokerQueue:
        return BrokerQueue(
            address=f"room-{room_of(subscription)}",
            name=f"{PULL_PREFIX}{subscription}",
            routing="MULTICAST",
        )

    def user_name(self, subscription: SubscriptionId) -> str:
        """Return the broker's user, and role, that may read a native subscription's queue."""
        return f"{self.user_prefix}{subscription}"

    @property
    def user_prefix(self) -> str:
        return f"{self.farm}-{self.client}-{PULL_PREFIX}"

    def queue_for(self, copy: DeliveryTask) -> BrokerQueue:
        if copy.kind is SubscriptionType.PULL:
            return self.pull(copy.subscription_id)
        return self.backlog if copy.behind else self.push


def destination_headers(queue: BrokerQueue) -> str:
    """Return the header lines that send to `queue`."""
    return f"destination:{escape(queue.destination)}\ndestination-type:{queue.routing}\n"
