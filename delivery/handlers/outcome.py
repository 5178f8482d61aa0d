"""Derive outcomes of messages from their handlers' results, and write them to the magazines.

Writes are batched, and repeated until the store answers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from delivery.handlers.magazines import QueueMagazines, to_sideline_entry
from rooms.batching import Batcher
from rooms.domain.magazine import MAX_BATCH, Entry, Slot, StoredEntry
from rooms.errors import MagazineUnavailableError
from rooms.outages import OUTAGES

MAX_DETAIL: Final = 500


class HandlerResult(StrEnum):
    """Name what happens to a message: deleted as handled, sidelined and deleted, or dropped."""

    HANDLED = "handled"
    SIDELINED = "sidelined"
    IGNORED = "ignored"


class SidelineReason(StrEnum):
    """Name the reason for which a message was sidelined."""

    REFUSED = "refused"
    """The handler returned False."""
    RAISED = "raised"
    TIMED_OUT = "timed_out"
    STUCK = "stuck"
    """Its process died, or hung, while it was handled."""
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerOutcome:
    """Hold a result, with reason and detail if it is sidelined."""

    result: HandlerResult
    reason: SidelineReason | None = None
    detail: str | None = None


HANDLED_OUTCOME: Final = HandlerOutcome(result=HandlerResult.HANDLED)
REFUSED_OUTCOME: Final = HandlerOutcome(
    result=HandlerResult.SIDELINED, reason=SidelineReason.REFUSED
)


def outcome_of_error(
    error: BaseException, ignorable: tuple[type[Exception], ...]
) -> HandlerOutcome:
    """Return the outcome of a handler's exception."""
    if isinstance(error, ignorable):
        return HandlerOutcome(result=HandlerResult.IGNORED)
    return HandlerOutcome(
        result=HandlerResult.SIDELINED,
        reason=SidelineReason.RAISED,
        detail=_to_detail(f"{type(error).__name__}: {_text_of(str, error)}"),
    )


def timeout_outcome(timeout_s: float) -> HandlerOutcome:
    """Return the outcome of a handler that did not return in time."""
    return HandlerOutcome(
        result=HandlerResult.SIDELINED,
        reason=SidelineReason.TIMED_OUT,
        detail=f"no answer within {timeout_s:g} s",
    )


def outcomes_of_return(returned: object, count: int) -> Sequence[HandlerOutcome]:
    """Return the outcomes of a handler's return value, for each of its `count` messages."""
    match returned:
        case bool():
            return [HANDLED_OUTCOME if returned else REFUSED_OUTCOME] * count
        case [*each] if len(each) == count and all(isinstance(one, bool) for one in each):
            return [HANDLED_OUTCOME if one else REFUSED_OUTCOME for one in each]
        case _:
            text = _text_of(repr, returned)
            detail = f"the handler returned {text}, which is neither True nor False"
            return [
                HandlerOutcome(
                    result=HandlerResult.SIDELINED,
                    reason=SidelineReason.RAISED,
                    detail=_to_detail(detail),
                )
            ] * count


def _text_of(describe: Callable[[object], str], described: object) -> str:
    """Return the text of a handler's object, whose own code may raise as the handler may."""
    try:
        return describe(described)
    except Exception as exc:  # noqa: BLE001 - its result would be lost, and those beside it
        return f"(its text raised {type(exc).__name__})"


def _to_detail(text: str) -> str:
    """Return text of a handler as a store can keep it: no store encodes a lone surrogate."""
    return text.encode("utf-8", "replace").decode()[:MAX_DETAIL]


R = TypeVar("R")

_FIRST_WAIT_S: Final = 0.1
_SETTLE_OUTAGE: Final = "attempts to record handler results failed"
_MAX_WAIT_S: Final = 5.0


class MessageSettler:
    """Settle messages of one queue, through outages. MagazineMissingError: it was deleted."""

    def __init__(self, queue_magazines: QueueMagazines) -> None:
        self._magazines = queue_magazines
        self._delete_batcher: Batcher[Slot, bool] = Batcher(self._delete, max_items=MAX_BATCH)
        self._load_batcher: Batcher[Entry, Slot] = Batcher(
            queue_magazines.sideline.load, max_items=MAX_BATCH
        )

    async def settle(
        self,
        stored: Sequence[StoredEntry],
        outcomes: Sequence[HandlerOutcome],
        *,
        held_for_s: float,
        stuck_s: float,
    ) -> tuple[Sequence[bool], Sequence[Slot | None]]:
        """Load failed messages into the sideline, then delete all.

        Returns for each message whether this call deleted it, and its slot in the sideline.
        `held_for_s`: the time since it was fired. A message that a sweeper took in the meantime is
        in the sideline already, and must not be loaded there twice.
        """
        failed = [
            n for n, outcome in enumerate(outcomes) if outcome.result is HandlerResult.SIDELINED
        ]
        if failed and held_for_s > stuck_s / 2:
            # This process's stamp is older than this; a sweeper, which waits `stuck_s`, has a
            # younger one.
            older_than_s = held_for_s - stuck_s / 2
            slots = [stored[n].slot for n in failed]
            owned = {
                one.slot
                for one in await retry_until_available(
                    lambda: self._magazines.main.take(slots, older_than_s=older_than_s)
                )
            }
            failed = [n for n in failed if stored[n].slot in owned]
        entries = [
            to_sideline_entry(stored[n].entry, outcomes[n].reason or "", outcomes[n].detail)
            for n in failed
        ]
        loaded = await retry_until_available(lambda: self._load_batcher.submit(entries))
        sideline_slots: list[Slot | None] = [None] * len(stored)
        for n, slot in zip(failed, loaded, strict=True):
            sideline_slots[n] = slot
        deleted = await retry_until_available(
            lambda: self._delete_batcher.submit([one.slot for one in stored])
        )
        return deleted, sideline_slots

    async def remove_from_sideline(self, slots: Sequence[Slot]) -> int:
        """Delete messages that were handled after all; return how many were not shoveled yet."""
        taken = await retry_until_available(lambda: self._magazines.sideline.take(slots))
        if taken:
            await retry_until_available(
                lambda: self._magazines.sideline.delete([one.slot for one in taken])
            )
        return len(taken)

    async def _delete(self, slots: Sequence[Slot]) -> Sequence[bool]:
        deleted = set(await self._magazines.main.delete(slots))
        return [slot in deleted for slot in slots]


async def retry_until_available(call: Callable[[], Awaitable[R]]) -> R:
    """Call until the store is available, and return the result."""
    wait_s = _FIRST_WAIT_S
    while True:
        try:
            result = await call()
        except MagazineUnavailableError as exc:
            OUTAGES.record_failure(exc, _SETTLE_OUTAGE)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_WAIT_S)
        else:
            OUTAGES.record_success(_SETTLE_OUTAGE)
            return result
