"""State what a push worker needs from its source of tasks."""

from collections.abc import Sequence
from typing import Protocol

from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import OrganisationId
from rooms.ports import Consumer


class ClaimingConsumer(Consumer, Protocol):
    """Consume the PUSH queue with claims, which end at their deadlines.

    Unsettled tasks keep their credit beyond that, because their outcomes may still wait to be
    committed. So the credit also bounds the outcomes that wait.
    """

    def forget(self, tasks: Sequence[DeliveryTask]) -> None:
        """Return the credit of tasks without an outcome; each comes again when its claim ends."""
        ...

    def take_excess(
        self, tasks: Sequence[DeliveryTask], organisation: OrganisationId, *, are_kept: bool
    ) -> Sequence[DeliveryTask]:
        """Count a subscription's tasks for its organisation; return those beyond its part.

        They count no longer, and must get an outcome at once: what hangs would leave no credit to
        others. `are_kept`: return none, because they end soon.
        """
        ...

    def room_for(self, organisation: OrganisationId) -> int | None:
        """Return how many more tasks may be queued for an organisation; None: there is no bound."""
        ...

    def expect(self, organisation: OrganisationId, count: int) -> None:
        """Leave room for tasks that were queued for an organisation, and will be delivered."""
        ...


class TaskSource(Protocol):
    """Provide claimed tasks to a push worker."""

    def consume(self, *, credit: int) -> ClaimingConsumer:
        """Consume the PUSH queue, as `Broker.consume` does."""
        ...
