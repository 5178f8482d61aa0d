"""Collects what became of copies and commits it in batches: large ones when there is much, at once when there is little."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final

from rooms.errors import StorageRefusedError, StorageUnavailableError
from rooms.outages import OUTAGES
from rooms.storage.outcomes import Outcome, Outcomes

_log = logging.getLogger(__name__)

_UNCOMMITTED: Final = "commits of outcomes failed"
_BATCH: Final = 400
_LINGER_S: Final = 0.01
_LONG_LINGER_S: Final = 0.03
_LINGER_FROM: Final = 4
_LONG_LINGER_FROM: Final = 20
"""So many outcomes since the last commit make it likely that more come: wait for them a moment."""
_RETRY_S: Final = (0.05, 0.1, 0.2, 0.5)


def _without_words(outcome: Outcome) -> Outcome | None:
    """The outcome without what the endpoint said, which alone is neither ours nor checked; None where it said nothing."""
    answer = outcome.answer
    if answer is None or not (answer.detail or answer.body_head):
        return None
    return replace(outcome, answer=replace(answer, detail="", body_head=b""))


class Settler:
    """`add` never blocks; `run` commits until cancelled; `drain` waits until everything added is committed."""

    def __init__(self, outcomes: Outcomes, *, settled: Callable[[Sequence[Outcome]], Awaitable[None]]) -> None:
        self._outcomes = outcomes
        self._settled = settled
        self._pending: list[Outcome] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.worker = 0
        """The writer id under which the copies were claimed, for the log."""

    def add(self, outcome: Outcome) -> None:
        """Have an outcome committed soon."""
        self._pending.append(outcome)
        if len(self._pending) == 1:
            self._idle.clear()
            self._wake.set()

    async def drain(self) -> None:
        """Until nothing is left to commit."""
        await self._idle.wait()

    async def run(self) -> None:
        """Commit for ever. Where PostgreSQL is away, outcomes wait here: a copy is not given back before its end."""
        last = 0
        while True:
            if not self._pending:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
            if last >= _LINGER_FROM and len(self._pending) < _BATCH:
                await asyncio.sleep(_LONG_LINGER_S if last >= _LONG_LINGER_FROM else _LINGER_S)
            batch, self._pending = self._pending[:_BATCH], self._pending[_BATCH:]
            last = len(batch)
            await self._commit(batch)
            await self._settled(batch)

    async def _commit(self, batch: Sequence[Outcome]) -> None:
        tries, again = 0, False
        while True:
            try:
                await self._outcomes.decide(batch, worker=self.worker, again=again)
            except (StorageUnavailableError, StorageRefusedError) as exc:
                again = again or isinstance(exc, StorageUnavailableError)
                OUTAGES.failed(exc, _UNCOMMITTED)
                await asyncio.sleep(_RETRY_S[min(tries, len(_RETRY_S) - 1)])
                tries += 1
            except Exception:  # noqa: BLE001 - one outcome that PostgreSQL will never take must not stop all others
                if len(batch) > 1:
                    for outcome in batch:
                        await self._commit([outcome])
                elif (plain := _without_words(batch[0])) is not None:
                    await self._commit([plain])
                else:
                    _log.exception(
                        "an outcome cannot be recorded; its copy comes back when the claim ends: %r", batch[0]
                    )
                return
            else:
                OUTAGES.succeeded(_UNCOMMITTED)
                return
