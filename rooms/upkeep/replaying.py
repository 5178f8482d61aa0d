"""Replays: jobs that give a subscription the room's past messages once more, or for the first time.

Arguments: `{"room_id", "subscription_id"}`, `"since"` or `"from_message_id"`, and perhaps `"until"`, `"event_types"`,
`"rate_per_s"`, `"include_expired"`. A message counts as past that was published before the job was asked for: what comes
later comes by itself.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rooms.domain.ids import (
    JobId,
    MessageId,
    RoomId,
    SubscriptionId,
    first_id,
    id_before,
    replayed_id,
    room_of,
)
from rooms.domain.job import JobKind
from rooms.domain.pace import Pace
from rooms.domain.room import Interest
from rooms.domain.states import SubscriptionType
from rooms.ports import Clock
from rooms.publishing.sandbox import Sandbox
from rooms.storage.replays import BATCH, Batch, Past, Replays
from rooms.storage.subscriptions import missing
from rooms.storage.worklist import Task, Worklist
from rooms.upkeep.duty import GoOn
from rooms.upkeep.jobs import Work, rest
from rooms.upkeep.restoring import SKEW, Queued

_SALTS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a replay is asked to do, as its job's arguments say it."""

    room: RoomId
    subscription: SubscriptionId
    after: str
    until: str
    event_types: frozenset[str] | None
    rate_per_s: float | None
    include_expired: bool

    @classmethod
    def read(cls, arguments: Mapping[str, Any], asked_at: datetime) -> "Wish":
        """The wish in a job's arguments. ValueError, KeyError: they make no sense."""
        subscription = SubscriptionId(arguments["subscription_id"])
        first, since, until = (arguments.get(name) for name in ("from_message_id", "since", "until"))
        begin = first_id(_ms(since)) if first is None else first
        end_ms = int((asked_at + SKEW).timestamp() * 1000) if until is None else _ms(until)
        types = arguments.get("event_types")
        return cls(
            room=room_of(subscription),
            subscription=subscription,
            after=id_before(begin),
            until=first_id(end_ms),
            event_types=None if types is None else frozenset(types),
            rate_per_s=arguments.get("rate_per_s"),
            include_expired=bool(arguments.get("include_expired", False)),
        )

    def means(self, past: Past) -> bool:
        """Whether a message is one of those that were asked for."""
        return not past.newer and (self.event_types is None or past.event_type in self.event_types)


async def wanted_of(
    page: Sequence[Past], interests: Sequence[Interest] | None, expression: str | None, sandbox: Sandbox
) -> set[MessageId]:
    """Return the messages of a page that a subscription wants, as a publish would see it."""
    typed = [past for past in page if _of_type(interests, past)]
    if expression is None or not typed:
        return {past.id for past in typed}
    # The upkeep starts without the library of filters.
    from rooms.publishing.checks import judge_all
    from rooms.publishing.filter import Subject, kept_filter

    subjects = [
        Subject(
            payload=past.payload or b"null",
            headers=json.loads(past.headers or b"{}"),
            event_type=past.event_type,
            event_version=past.event_version,
            ordering_key=past.ordering_key,
            priority=past.priority,
        )
        for past in typed
    ]
    judgements = await judge_all(sandbox, kept_filter(expression), subjects)
    return {past.id for past, judgement in zip(typed, judgements, strict=True) if judgement.matches}


def _of_type(interests: Sequence[Interest] | None, past: Past) -> bool:
    return interests is None or any(
        interest.name == past.event_type and (interest.versions is None or past.event_version in interest.versions)
        for interest in interests
    )


class Replaying:
    """Replays what a job means."""

    def __init__(
        self,
        worklist: Worklist,
        records: Replays,
        clock: Clock,
        *,
        queued: Queued,
        sandbox: Sandbox,
        batch: int = BATCH,
    ) -> None:
        self._sandbox = sandbox
        self._worklist = worklist
        self._records = records
        self._clock = clock
        self._queued = queued
        self._batch = batch
        self._paces: dict[JobId, Pace] = {}

    def works(self) -> Mapping[JobKind, Work]:
        """What each kind of job does."""
        return {JobKind.REPLAY: self._replay}

    async def _replay(self, task: Task, go_on: GoOn) -> bool:
        wish = Wish.read(task.arguments, task.created_at)
        if task.total is None and go_on():
            await self._worklist.progress(task, total=await self._records.count(wish.room, wish.after, wish.until))
        # A job that made room for another keeps its pace, or each of its slices would begin with a batch for nothing.
        pace = self._paces.pop(task.id, None) or Pace(wish.rate_per_s, self._clock.monotonic)
        done = await self._walk(task, wish, pace, go_on)
        if not done:
            self._paces[task.id] = pace
        return done

    async def _walk(self, task: Task, wish: Wish, pace: Pace, go_on: GoOn) -> bool:
        position = task.position
        while go_on():
            interests, expression = await self._records.interests(wish.subscription)
            page = await self._records.page(
                wish.room,
                wish.after if position is None else position["after"],
                wish.until,
                asked_at=task.created_at,
                whole=expression is not None,
                limit=self._batch,
            )
            possible = [past for past in page if wish.means(past)]
            meant = await wanted_of(possible, interests, expression, self._sandbox)
            for part in _parts(page, meant, pace.batch(self._batch)):
                if not await rest(pace.wait_s(part.meant), go_on):
                    return False
                if not await self._give(task.id, position, wish, part):
                    return False
                position = {"after": part.last}
            if len(page) < self._batch:
                return True
        return False

    async def _give(self, job: JobId, position: Mapping[str, Any] | None, wish: Wish, part: "_Part") -> bool:
        for salt in range(_SALTS):
            batch = Batch(
                given=[(message, replayed_id(message, job, salt)) for message in part.messages],
                last=part.last,
                seen=part.seen,
                passed=part.seen - part.meant,
            )
            given = await self._records.give(job, position, wish.subscription, batch, expired=wish.include_expired)
            if given is None:
                return False
            if given.type is None:
                raise missing(wish.subscription)
            if not given.taken:
                self._queued(wish.subscription if given.type == SubscriptionType.PULL else None)
                return True
        raise ValueError(f"the deliveries of messages up to {part.last} have ids that others have")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Some messages of a page that are meant, and all that lie between them."""

    messages: Sequence[MessageId]
    last: MessageId
    seen: int

    @property
    def meant(self) -> int:
        return len(self.messages)


def _parts(page: Sequence[Past], meant: Collection[MessageId], size: int) -> list[_Part]:
    """A page cut so that no part has more than `size` messages that are meant; the last one goes to the page's end."""
    cuts: list[list[Past]] = [[]]
    room = size
    for past in page:
        if past.id in meant:
            if not room:
                cuts.append([])
                room = size
            room -= 1
        cuts[-1].append(past)
    return [
        _Part(messages=[past.id for past in cut if past.id in meant], last=cut[-1].id, seen=len(cut))
        for cut in cuts
        if cut
    ]


def _ms(text: str | None) -> int:
    return 0 if text is None else int(datetime.fromisoformat(text).timestamp() * 1000)
