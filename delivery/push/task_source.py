"""State what a push worker needs from its source of tasks."""

from collections.abc import Sequence
from typing import Protocol

from delivery.brokers.credit_shares import CreditShares
from rooms.domain.delivery_task import DeliveryTask
from rooms.ports import Consumer


class ClaimingConsumer(Consumer, Protocol):
    """Consume the PUSH queue with claims, which end at their deadlines.

    Unsettled tasks keep their credit beyond that, because their outcomes may still wait to be
    committed. So the credit also bounds the outcomes that wait.
    """

    @property
    def intake_shares(self) -> CreditShares | None:
        """Return the shares of organisations, if the worker must hold what is beyond them.

        None: claims skip an organisation that has its share.
        """
        ...

    def forget(self, tasks: Sequence[DeliveryTask]) -> None:
        """Return the credit of tasks without an outcome; each comes again when its claim ends."""
        ...


class TaskSource(Protocol):
    """Provide claimed tasks to a push worker."""

    def consume(self, *, credit: int) -> ClaimingConsumer:
        """Consume the PUSH queue, as `Broker.consume` does."""
        ...
