"""Users of the broker: each native subscription's is there, and nobody else's.

The API makes them as it answers. What it could not do, because it died or the broker was away, and what a broker forgot
that was emptied, is done here.
"""

import logging

from rooms.ports import Gate
from rooms.storage.natives import passwords
from rooms.storage.writer import Writer
from rooms.upkeep.duty import GoOn

_log = logging.getLogger(__name__)


class GatesOfNatives:
    """Holds the broker's users against the subscriptions."""

    name = "the users of native subscriptions"

    def __init__(self, writer: Writer, gate: Gate) -> None:
        self._writer = writer
        self._gate = gate

    async def run(self, go_on: GoOn) -> None:
        """Look at all of them once."""
        wanted = await passwords(self._writer) if go_on() else {}
        opened = await self._gate.opened(wanted) if go_on() else {}
        for subscription, hashed in wanted.items():
            if not go_on():
                return
            if not opened.get(subscription):
                await self._gate.open(subscription, hashed)
                _log.info("the broker's user of subscription %s was made", subscription)
        if not go_on():
            return
        # Asked again: what was made by the API since the first look is nobody's only in the old answer.
        alive = await passwords(self._writer) if opened.keys() - wanted.keys() else wanted
        for subscription in opened.keys() - alive.keys():
            if not go_on():
                return
            await self._gate.close(subscription)
            _log.info("the broker's user of subscription %s is gone: there is no such subscription", subscription)
