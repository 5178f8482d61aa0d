"""What a broker hands out of a PULL queue and nobody leases."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from rooms.domain.copy import Copy
from rooms.errors import RoomsError
from rooms.outages import OUTAGES
from rooms.ports import Unreadable
from rooms.pulling.tap import Tap
from rooms.storage.claims import Claims, step_of
from rooms.storage.copy_leases import to_come
from rooms.storage.orphans import adopt, sideline, sideline_unreadable
from rooms.storage.writer import Writer

_log = logging.getLogger(__name__)

_UNRESTED: Final = "tries to settle copies that no poll can have failed"
LEAST_S: Final = 0.02
"""What may be leased by now was not a moment ago."""

Orphaned = Callable[[int, int], None]
"""Is told how many orphans were sidelined, and how many could not be."""


class Strays:
    """Brings strays to rest, then has the broker forget them. What fails comes again when their tap has closed."""

    def __init__(self, writer: Writer, orphaned: Orphaned) -> None:
        self._writer = writer
        self._claims = Claims(writer)
        self._orphaned = orphaned
        self._tasks: set[asyncio.Task[None]] = set()

    def left(self, tap: Tap, copies: Sequence[Copy]) -> None:
        """These are of steps that are over; or of no delivery at all, then they become one that is sidelined; or their message
        is gone, then their delivery is sidelined; or the broker's clock is ahead of PostgreSQL's, then they are offered
        again when they are due.
        """
        self._spawn(self._adopt(tap, copies))

    def unreadable(self, tap: Tap, messages: Sequence[Unreadable]) -> None:
        """These are no copies; the deliveries that wait for them, where that can be told, are sidelined."""
        self._spawn(self._sideline(tap, messages))

    async def finish(self) -> None:
        """Let what is under way end."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _adopt(self, tap: Tap, copies: Sequence[Copy]) -> None:
        standings = await self._claims.look(copies)
        if orphans := [copy for copy in copies if not standings[step_of(copy)].known]:
            _log.warning("%d copies have no delivery, the first is %s", len(orphans), orphans[0].delivery_id)
            self._orphaned(*await adopt(self._writer, orphans))
        early = await to_come(self._writer, copies)
        # What is due and was not leased came due in between, or nobody will ever lease it.
        due = [(copies[index].room_id, copies[index].delivery_id) for index, wait_s in early.items() if not wait_s]
        if due and (sidelined := await sideline(self._writer, due)):
            _log.error("%d deliveries wait for messages that are not there; they are sidelined", sidelined)
            early = await to_come(self._writer, copies)
        if early:
            tap.offer_again([copies[index] for index in early], after_s=max(LEAST_S, min(early.values())))
        tap.settle([copy for index, copy in enumerate(copies) if index not in early])

    async def _sideline(self, tap: Tap, messages: Sequence[Unreadable]) -> None:
        sidelined = await sideline_unreadable(self._writer, messages)
        self._orphaned(sidelined, len(messages) - sidelined)
        tap.discard(messages)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        async def told() -> None:
            try:
                await work
            except RoomsError as exc:
                OUTAGES.failed(exc, _UNRESTED)
            else:
                OUTAGES.succeeded(_UNRESTED)

        task = asyncio.create_task(told())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
