"""Dead letters of native queues: what a reader rejected at the broker is sidelined, so that it can be shoveled back.

The broker moves a rejected message to its dead-letter address, where this installation has a queue. A copy leaves that queue
once its delivery is sidelined, durably; a crash in between brings it again, and its step is over then.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from rooms.domain.copy import Copy
from rooms.ports import Consumer, Gate
from rooms.storage.natives import DeadLetter, sideline_rejected
from rooms.storage.writer import Writer
from rooms.upkeep.duty import GoOn

_log = logging.getLogger(__name__)

_CREDIT: Final = 500
_EMPTY_S: Final = 1.0
"""A queue that gives nothing for so long is empty, or has only what came too early."""


class NativeDeadLetters:
    """Reads the queue where there is anything in it."""

    name = "the dead letters of native queues"

    def __init__(self, writer: Writer, gate: Gate, count: Callable[[str, int], None]) -> None:
        """`count` gets an outcome and how many dead letters had it."""
        self._writer = writer
        self._gate = gate
        self._count = count

    async def run(self, go_on: GoOn) -> None:
        """Sideline what waits now. BrokerUnavailableError where the broker is away."""
        if not await self._gate.dead_letter_depth() or not go_on():
            return
        async with self._gate.dead_letters(credit=_CREDIT) as consumer:
            batches = consumer.batches()
            with suppress(TimeoutError):
                while go_on():
                    async with asyncio.timeout(_EMPTY_S):
                        copies = await anext(batches)
                    await self._sideline(consumer, copies)

    async def _sideline(self, consumer: Consumer, copies: Sequence[Copy]) -> None:
        if strange := consumer.unreadable():
            _log.warning("%d dead letters are no copies of Rooms, the first: %s", len(strange), strange[0].reason)
            self._count("unreadable", len(strange))
            await consumer.discard(strange)
        fates = await sideline_rejected(self._writer, copies)
        over = [copy for copy, fate in zip(copies, fates, strict=True) if fate is not DeadLetter.EARLY]
        await consumer.settle(over)
        for fate in (DeadLetter.SIDELINED, DeadLetter.DISCARDED):
            if count := fates.count(fate):
                _log.info("%d dead letters of native queues: %s", count, fate)
                self._count(fate, count)
