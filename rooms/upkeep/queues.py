"""Queues that belong to nobody: a relay that stood still may have made one for a subscription deleted meanwhile."""

import logging

from rooms.ports import Broker
from rooms.storage.relay import living
from rooms.storage.writer import Writer
from rooms.upkeep.duty import GoOn

_log = logging.getLogger(__name__)


class QueuesOfNobody:
    """Deletes the queues of this installation whose subscription is not there. What somebody consumes waits."""

    name = "the end of queues that belong to nobody"

    def __init__(self, writer: Writer, broker: Broker) -> None:
        self._writer = writer
        self._broker = broker

    async def run(self, go_on: GoOn) -> None:
        """Look at all of them once."""
        # In this order: a queue is only made for a subscription that is there.
        queues = await self._broker.queues() if go_on() else ()
        alive = await living(self._writer, queues) if queues else frozenset()
        for queue in queues:
            if not go_on():
                return
            if queue not in alive and await self._broker.delete(queue):
                _log.warning("the queue of subscription %s was deleted: there is no such subscription", queue)
