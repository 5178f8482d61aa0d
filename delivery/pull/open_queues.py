"""Bound the queues of an external broker that a process has open, since each is a connection.

An organisation that has its share, or the one with the most where the process has all, gives up a
queue that holds and awaits nothing for the next one: the one from which nothing came for longest.
The next one is opened when that one has closed. Its polls go on waiting. They are notified when
something is due, and their queue is opened again then.
"""

from collections.abc import Iterator
from typing import Final

from delivery.pull.broker_consumer import BrokerConsumer
from delivery.pull.target import PullTarget
from rooms.domain.ids import OrganisationId

MAX_OPEN_QUEUES: Final = 2000
"""The most in a process; an organisation has half of them."""


class OpenQueues:
    """Hold the consumers of open queues."""

    def __init__(self, most: int) -> None:
        """Open at most so many."""
        self._most = most
        self._most_of_one = max(1, most // 2)
        self._consumers: dict[PullTarget, BrokerConsumer] = {}
        self._by_organisation: dict[OrganisationId, dict[PullTarget, None]] = {}
        """The queue from which nothing came for longest is first."""

    def __iter__(self) -> Iterator[PullTarget]:
        return iter(self._consumers)

    def __contains__(self, key: PullTarget) -> bool:
        return key in self._consumers

    def get(self, key: PullTarget) -> BrokerConsumer | None:
        """Return the consumer of a queue; None: it is not open."""
        return self._consumers.get(key)

    def add(self, consumer: BrokerConsumer) -> None:
        """Add the consumer of a queue that is not open."""
        self._consumers[consumer.key] = consumer
        self._by_organisation.setdefault(consumer.key.organisation, {})[consumer.key] = None

    def remove(self, consumer: BrokerConsumer) -> bool:
        """Remove a consumer that ends; return whether it was there."""
        key = consumer.key
        if self._consumers.get(key) is not consumer:
            return False
        del self._consumers[key]
        own = self._by_organisation[key.organisation]
        del own[key]
        if not own:
            del self._by_organisation[key.organisation]
        return True

    def on_copies(self, key: PullTarget) -> None:
        """Record that something came from a queue."""
        if key in self._consumers:
            own = self._by_organisation[key.organisation]
            del own[key]
            own[key] = None

    def is_full(self, organisation: OrganisationId) -> bool:
        """Return whether the organisation can have another queue only in place of one."""
        own = self._by_organisation.get(organisation, {})
        return len(own) >= self._most_of_one or len(self._consumers) >= self._most

    def find_idle(self, organisation: OrganisationId) -> BrokerConsumer | None:
        """Return the consumer to give up for another queue of the organisation; None: none."""
        own = self._by_organisation.get(organisation, {})
        if len(own) < self._most_of_one:
            own = max(self._by_organisation.values(), key=len, default=own)
        consumers = (self._consumers[key] for key in own)
        return next((consumer for consumer in consumers if consumer.is_idle), None)
