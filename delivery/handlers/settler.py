"""Puts what handlers decided into the magazines, in batches, for as long as it takes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from delivery.handlers.bunch import Bunch
from delivery.handlers.outcome import Outcome, Result
from delivery.handlers.pair import Pair, aside
from rooms.domain.magazine import Entry, Slot, Stored
from rooms.errors import MagazineUnavailableError
from rooms.outages import OUTAGES

R = TypeVar("R")

_FIRST_WAIT_S: Final = 0.1
_UNSETTLED: Final = "tries to record what handlers decided failed"
_LONGEST_WAIT_S: Final = 5.0


class Settler:
    """Of one queue. MagazineMissingError: the queue is gone; the store being away is waited out."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._deleting: Bunch[Slot, bool] = Bunch(self._delete)
        self._loading: Bunch[Entry, Slot] = Bunch(pair.sideline.load)

    async def settle(
        self, stored: Sequence[Stored], outcomes: Sequence[Outcome], *, held_s: float, stuck_s: float
    ) -> tuple[Sequence[bool], Sequence[Slot | None]]:
        """Load into the sideline what failed, then delete all. Of each: whether it was still ours, and where in the
        sideline it stands.

        `held_s`: how long ago it was handed out to us. What a sweeper took meanwhile is in the sideline already, and must
        not come there twice.
        """
        failed = [n for n, outcome in enumerate(outcomes) if outcome.result is Result.SIDELINED]
        if failed and held_s > stuck_s / 2:
            # Our own stamp is older than this, that of a sweeper, who waits `stuck_s`, is younger.
            again = held_s - stuck_s / 2
            slots = [stored[n].slot for n in failed]
            ours = {one.slot for one in await insist(lambda: self._pair.main.take(slots, older_than_s=again))}
            failed = [n for n in failed if stored[n].slot in ours]
        entries = [aside(stored[n].entry, outcomes[n].why or "", outcomes[n].detail) for n in failed]
        placed = await insist(lambda: self._loading.add(entries))
        aside_at: list[Slot | None] = [None] * len(stored)
        for n, slot in zip(failed, placed, strict=True):
            aside_at[n] = slot
        deleted = await insist(lambda: self._deleting.add([one.slot for one in stored]))
        return deleted, aside_at

    async def withdraw(self, slots: Sequence[Slot]) -> int:
        """Take messages out of the sideline that were handled after all; how many nobody had shoveled yet."""
        taken = await insist(lambda: self._pair.sideline.take(slots))
        if taken:
            await insist(lambda: self._pair.sideline.delete([one.slot for one in taken]))
        return len(taken)

    async def _delete(self, slots: Sequence[Slot]) -> Sequence[bool]:
        ended = set(await self._pair.main.delete(slots))
        return [slot in ended for slot in slots]


async def insist(call: Callable[[], Awaitable[R]]) -> R:
    """The call's answer, however often the store is away before; cancelling ends it."""
    wait_s = _FIRST_WAIT_S
    while True:
        try:
            answer = await call()
        except MagazineUnavailableError as exc:
            OUTAGES.failed(exc, _UNSETTLED)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        else:
            OUTAGES.succeeded(_UNSETTLED)
            return answer
