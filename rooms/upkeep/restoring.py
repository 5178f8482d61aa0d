"""Restores and clears: jobs that walk over the deliveries of a room, or of one message.

A restore's arguments: `{"room_id", "states"}`, and `"message_id"` or `"since"`; a clear's: `{"room_id", "name"}`. What was
published after a job was asked for is not meant by it.
"""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from rooms.domain.ids import MessageId, RoomId, SubscriptionId, born_ms, first_id, id_after, id_before, room_of
from rooms.domain.job import JobKind
from rooms.domain.states import State
from rooms.storage import clears, restores
from rooms.storage.clears import Clears
from rooms.storage.restores import Restores, Span
from rooms.storage.worklist import Task, Worklist
from rooms.upkeep.duty import GoOn
from rooms.upkeep.jobs import Work, rest

SKEW: Final = timedelta(minutes=1)
"""An id's time is that of the machine that made it: so much later than PostgreSQL's it may be."""
LOOKS: Final = 20
LOOK_AGAIN_S: Final = 0.05
"""A row that somebody has locked is looked at so often, so far apart, before a restore passes it over."""
ROUND_S: Final = 0.5
"""Between two rounds of a clear over what was under way."""

Queued = Callable[[SubscriptionId | None], None]
"""Is told, after a commit, that PUSH (None) or a PULL subscription has something to take up."""


class Restoring:
    """Restores what a job means."""

    def __init__(
        self, worklist: Worklist, records: Restores, *, queued: Queued, batch: int = restores.BATCH, looks: int = LOOKS
    ) -> None:
        self._worklist = worklist
        self._records = records
        self._queued = queued
        self._batch = batch
        self._looks = looks

    def works(self) -> Mapping[JobKind, Work]:
        """What each kind of job does."""
        return {JobKind.RESTORE: self._restore}

    async def _restore(self, task: Task, go_on: GoOn) -> bool:
        arguments, position, looks = task.arguments, task.position, 0
        states = frozenset(State(state) for state in arguments["states"])
        whole = _span_of(arguments, task.created_at)
        if task.total is None and go_on():
            await self._worklist.progress(task, total=await self._records.count(whole))
        while go_on():
            span = _behind(whole, position)
            page = await self._records.step(
                task.id,
                position,
                span,
                states,
                asked_at=task.created_at,
                on=looks >= self._looks,
                limit=self._batch,
            )
            if page is None:
                return False
            if page.push:
                self._queued(None)
            for subscription in page.pulls:
                self._queued(subscription)
            if page.end:
                return True
            if page.last is not None:
                position, looks = {"after": page.last}, 0
                continue
            looks += 1
            if not await rest(LOOK_AGAIN_S, go_on):
                return False
        return False


class Clearing:
    """Cancels all that is unfinished in a room. An attempt that is under way ends first, however it ends."""

    def __init__(
        self,
        worklist: Worklist,
        records: Clears,
        counts: Restores,
        *,
        batch: int = clears.BATCH,
        round_s: float = ROUND_S,
    ) -> None:
        self._worklist = worklist
        self._records = records
        self._counts = counts
        self._batch = batch
        self._round_s = round_s

    def works(self) -> Mapping[JobKind, Work]:
        """What each kind of job does."""
        return {JobKind.CLEAR_ROOM: self._clear}

    async def _clear(self, task: Task, go_on: GoOn) -> bool:
        position = task.position
        whole = _span_of(task.arguments, task.created_at)
        if task.total is None and go_on():
            await self._worklist.progress(task, total=await self._counts.count(whole))
        while go_on():
            span = _behind(whole, position)
            step = await self._records.step(task.id, position, span, asked_at=task.created_at, limit=self._batch)
            if step is None:
                return False
            position = step.position
            if not step.end:
                continue
            if position is None or "first" not in position:
                return True
            if not await rest(self._round_s, go_on):
                return False
            after, until = id_before(position["first"]), id_after(position["final"])
            if not await self._records.another_round(task.id, position, after=after, until=until):
                return False
            position = {"after": after, "until": until}
        return False


def _span_of(arguments: Mapping[str, Any], asked_at: datetime) -> Span:
    room = RoomId(int(arguments["room_id"]))
    if (message := arguments.get("message_id")) is not None:
        if room_of(message) != room:
            raise ValueError(f"message {message} is not of room {room}")
        at_ms = born_ms(message)
        return Span(room=room, after=id_before(first_id(at_ms)), until=first_id(at_ms + 1), message=MessageId(message))
    since = arguments.get("since")
    after_ms = 0 if since is None else _ms(datetime.fromisoformat(since))
    return Span(room=room, after=id_before(first_id(after_ms)), until=first_id(_ms(asked_at + SKEW)))


def _behind(whole: Span, position: Mapping[str, Any] | None) -> Span:
    if position is None:
        return whole
    return Span(
        room=whole.room,
        after=position["after"],
        until=position.get("until", whole.until),
        message=whole.message,
    )


def _ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)
