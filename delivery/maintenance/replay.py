"""Replay jobs: deliver a room's past messages to a subscription, again or for the first time.

Arguments: `{"room_id", "subscription_id"}`, `"since"` or `"from_message_id"`, and optionally
`"until"`, `"event_types"`, `"ordering_keys"`, `"business_keys"`, `"rate_per_s"`,
`"include_expired"`. Only messages that were published
before the job was created are replayed; later ones are delivered anyway.

`"missing"`: a subscription was just approved, and gets what was published since its request, or it
was just created with a start in the past. A publish that had begun before that may commit after it,
without a delivery to the subscription. So the job waits until all such publishes are over, and then
delivers each message of that time that has no delivery to the subscription. The time of the job's
creation is when its transaction began, which may be long before other processes saw the change. So
the wait begins when maintenance first sees the job, and messages up to then are delivered.

`"entitled"`: `[{"event_types", "from_us", "until_us"}]`, what another organisation's subscription
may have (times in epoch microseconds, null: no end).

A message that was published for chosen destinations is replayed to another organisation's
subscription only if it was among them. Nor does such a subscription get what was withdrawn, or, but
for a backfill, what is not due. These are left out before the filter is evaluated, so that neither
deliveries nor counts of the job show whether the filter matches them. What a backfill delivers that
is not due, or held by a suspension, is not counted.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from delivery.maintenance.job_rates import JobRateLimiters
from delivery.maintenance.job_totals import JobTotals
from delivery.maintenance.jobs import JobHandler, sleep_unless_stopped
from delivery.maintenance.restore import SKEW, OnQueued
from delivery.maintenance.task import ShouldContinue
from rooms.db.catalog.subscriptions import subscription_not_found
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.db.jobs.replay import (
    BATCH,
    PastMessage,
    ReplayBatch,
    ReplayQueries,
    ReplayResult,
)
from rooms.domain.event_type_pattern import matches
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
from rooms.domain.rate_limiter import RateLimiter
from rooms.domain.room import Interest
from rooms.domain.state_machine import SubscriptionType
from rooms.ports import Clock
from rooms.publishing.sandbox.client import CheckSandbox

_MAX_SALTS: Final = 8
_SKEW_MS: Final = SKEW // timedelta(milliseconds=1)
BACKFILL_AFTER_S: Final = 15.0
"""Seconds for which a job waits in any case: publishes that began before it usually commit then."""
_MAX_SEEN: Final = 10_000
"""Jobs whose first sight is remembered; one that is forgotten waits again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entitlement:
    """Name event types (patterns; None: all) that a subscription might receive in a period."""

    event_types: tuple[str, ...] | None
    from_us: int
    until_us: int | None
    """Microseconds since 1970; the end is not part of the period."""
    versions: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """By pattern of event types; of one that is not named, every version."""
    filter: str | None = None
    """It was entitled to what this matches, so only while it still has this filter."""

    @classmethod
    def parse(cls, arguments: Mapping[str, Any]) -> "Entitlement":
        """Parse one entry of a job's arguments."""
        types = arguments["event_types"]
        if "from" in arguments:  # of a job that version 0.1.0 has made: whole milliseconds
            until_ms = arguments["until"]
            return cls(
                event_types=None if types is None else tuple(types),
                from_us=arguments["from"] * 1000,
                until_us=None if until_ms is None else until_ms * 1000,
            )
        return cls(
            event_types=None if types is None else tuple(types),
            from_us=arguments["from_us"],
            until_us=arguments["until_us"],
            versions={
                name: frozenset(known) for name, known in arguments.get("versions", {}).items()
            },
            filter=arguments.get("filter"),
        )

    def includes(self, past: PastMessage, expression: str | None) -> bool:
        """Return whether a message was published in the period, and is of such a type and version.

        `expression`: the filter that the subscription has now.
        """
        return (
            self.from_us <= past.published_us
            and (self.until_us is None or past.published_us < self.until_us)
            and self.filter in (None, expression)
            and (
                self.event_types is None
                or any(
                    matches(name, past.event_type)
                    and (name not in self.versions or past.event_version in self.versions[name])
                    for name in self.event_types
                )
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """Hold the arguments of a replay job."""

    room: RoomId
    subscription: SubscriptionId
    after: str
    since: datetime | None
    """Messages that were published earlier are left out, whatever the time in their ids is."""
    until: str
    event_types: frozenset[str] | None
    ordering_keys: frozenset[str] | None
    business_keys: frozenset[str]
    """Empty: every message."""
    rate_per_s: float | None
    include_expired: bool
    missing: bool
    entitled: tuple["Entitlement", ...] | None

    @classmethod
    def parse(cls, arguments: Mapping[str, Any], requested_at: datetime) -> "ReplayRequest":
        """Parse a job's arguments. ValueError, KeyError: they are invalid."""
        subscription = SubscriptionId(arguments["subscription_id"])
        first, since, until = (
            arguments.get(name) for name in ("from_message_id", "since", "until")
        )
        begin = first_id(_ms(since) - _SKEW_MS) if first is None else first
        end_ms = int((requested_at + SKEW).timestamp() * 1000) if until is None else _ms(until)
        types, ordering_keys = arguments.get("event_types"), arguments.get("ordering_keys")
        return cls(
            room=room_of(subscription),
            subscription=subscription,
            after=id_before(begin),
            since=None if since is None or first is not None else datetime.fromisoformat(since),
            until=first_id(end_ms),
            event_types=None if types is None else frozenset(types),
            ordering_keys=None if ordering_keys is None else frozenset(ordering_keys),
            business_keys=frozenset(arguments.get("business_keys", ())),
            rate_per_s=arguments.get("rate_per_s"),
            include_expired=bool(arguments.get("include_expired", False)),
            missing=bool(arguments.get("missing", False)),
            entitled=None
            if "entitled" not in arguments
            else tuple(map(Entitlement.parse, arguments["entitled"])),
        )

    @property
    def is_foreign(self) -> bool:
        """Return whether it is for a subscription in another organisation's room.

        Its job counts only what it delivers, and nothing that shows how much the room has.
        """
        return self.missing or self.entitled is not None

    def matches(self, past: PastMessage, expression: str | None) -> bool:
        """Return whether the job asks for this message, of a subscription with this filter."""
        return (
            (self.missing or not past.newer)
            and not (self.is_foreign and (past.for_others or past.hidden))
            and (self.event_types is None or past.event_type in self.event_types)
            and (self.ordering_keys is None or past.ordering_key in self.ordering_keys)
            and (
                self.entitled is None
                or any(one.includes(past, expression) for one in self.entitled)
            )
        )


async def wanted_messages(
    page: Sequence[PastMessage],
    interests: Sequence[Interest] | None,
    expression: str | None,
    sandbox: CheckSandbox,
) -> set[MessageId]:
    """Return the messages of a page that a publish would deliver to the subscription."""
    typed = [past for past in page if _has_wanted_type(interests, past)]
    if expression is None or not typed:
        return {past.id for past in typed}
    # Maintenance starts faster without the CEL library.
    from rooms.publishing.cel_filter import FilterInput, load_filter
    from rooms.publishing.deferred_checks import evaluate_all

    subjects = [
        FilterInput(
            payload=past.payload or b"null",
            headers=json.loads(past.headers or b"{}"),
            event_type=past.event_type,
            event_version=past.event_version,
            ordering_key=past.ordering_key,
            priority=past.priority,
        )
        for past in typed
    ]
    results = await evaluate_all(sandbox, load_filter(expression), subjects)
    return {past.id for past, result in zip(typed, results, strict=True) if result.matches}


def _has_wanted_type(interests: Sequence[Interest] | None, past: PastMessage) -> bool:
    return interests is None or any(
        matches(interest.name, past.event_type)
        and (interest.versions is None or past.event_version in interest.versions)
        for interest in interests
    )


class ReplayJob:
    """Run replay jobs."""

    def __init__(
        self,
        job_queue: JobQueue,
        queries: ReplayQueries,
        clock: Clock,
        *,
        on_queued: OnQueued,
        sandbox: CheckSandbox,
        batch: int = BATCH,
    ) -> None:
        self._sandbox = sandbox
        self._job_queue = job_queue
        self._queries = queries
        self._clock = clock
        self._on_queued = on_queued
        self._batch = batch
        self._rate_limiters = JobRateLimiters(clock.monotonic)
        self._totals = JobTotals(job_queue)
        self._first_seen: dict[JobId, tuple[float, datetime]] = {}
        """By this process's monotonic clock, and by PostgreSQL's."""

    def handlers(self) -> Mapping[JobKind, JobHandler]:
        """Return the handler of each kind of job."""
        return {JobKind.REPLAY: self._replay}

    async def _replay(self, job: OpenJob, should_continue: ShouldContinue) -> bool:
        if len(self._first_seen) > _MAX_SEEN:  # jobs that were cancelled or failed are among them
            self._first_seen.clear()
        seen_s, seen_at = self._first_seen.setdefault(
            job.id, (self._clock.monotonic(), job.seen_at)
        )
        is_missing = bool(job.arguments.get("missing", False))
        if is_missing and (
            self._clock.monotonic() - seen_s < BACKFILL_AFTER_S
            or (job.position is None and await self._job_queue.has_older_publish(seen_at))
        ):
            return False
        request = ReplayRequest.parse(job.arguments, seen_at if is_missing else job.created_at)
        if not request.is_foreign:
            await self._totals.record(
                job,
                lambda: self._queries.count(
                    request.room,
                    request.after,
                    request.until,
                    since=request.since,
                    business_keys=request.business_keys,
                ),
                should_continue,
            )
        limiter = self._rate_limiters.get(job.id, request.rate_per_s)
        done = await self._walk(job, request, limiter, should_continue)
        if done:
            self._first_seen.pop(job.id, None)  # another job may have cleared all of them
            self._rate_limiters.forget(job.id)
        return done

    async def _walk(
        self,
        job: OpenJob,
        request: ReplayRequest,
        limiter: RateLimiter,
        should_continue: ShouldContinue,
    ) -> bool:
        position = job.position
        while should_continue():
            after = request.after if position is None else position["after"]
            parts, end = await self._next_parts(job, request, after, limiter)
            for part in parts:
                if not await sleep_unless_stopped(limiter.delay_s(), should_continue):
                    return False
                limiter.take(part.count)
                result = await self._insert(job.id, position, request, part)
                if result is None:
                    return False
                if result.is_outdated:  # what it wants of the rest of the page is decided anew
                    end = False
                    break
                position = {"after": part.last}
            if end:
                return True
        return False

    async def _next_parts(
        self, job: OpenJob, request: ReplayRequest, after: str, limiter: RateLimiter
    ) -> tuple[Sequence["_PagePart"], bool]:
        """Return what is wanted of the next page, and whether it is the last page.

        Payloads are dropped here: a job may wait for its rate for long.
        """
        interests = await self._queries.interests(request.subscription)
        page = await self._queries.page(
            request.subscription,
            after,
            request.until,
            since=request.since,
            requested_at=job.created_at,
            with_payload=interests.filter is not None,
            foreign=request.is_foreign,
            missing=request.missing,
            business_keys=request.business_keys,
            limit=self._batch,
        )
        possible = [past for past in page.messages if request.matches(past, interests.filter)]
        wanted = await wanted_messages(
            possible, interests.event_types, interests.filter, self._sandbox
        )
        size = limiter.batch_size(self._batch)
        return _split_page(page.messages, wanted, size, interests.version), page.end

    async def _insert(
        self,
        job: JobId,
        position: Mapping[str, Any] | None,
        request: ReplayRequest,
        part: "_PagePart",
    ) -> ReplayResult | None:
        """Deliver a part; None: the job has ended, or is at another position."""
        for salt in range(_MAX_SALTS):
            batch = ReplayBatch(
                deliveries=[
                    (message, replayed_id(message, job, salt)) for message in part.messages
                ],
                version=part.version,
                last=part.last,
                scanned=part.count if request.is_foreign else part.scanned,
                unwanted=0 if request.is_foreign else part.scanned - part.count,
            )
            result = await self._queries.insert(
                job,
                position,
                request.subscription,
                batch,
                expired=request.include_expired,
                missing=request.missing,
            )
            if result is None:
                return None
            if result.type is None:
                raise subscription_not_found(request.subscription)
            if result.is_outdated:
                return result
            if not result.clashing_ids:
                self._on_queued(
                    request.subscription if result.type == SubscriptionType.PULL else None
                )
                return result
        raise ValueError(
            f"no free delivery ids for messages up to {part.last} after {_MAX_SALTS} attempts"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PagePart:
    """Hold wanted messages of a page; `scanned` counts the unwanted ones between them, too.

    `version`: of the subscription that wants them.
    """

    messages: Sequence[MessageId]
    last: MessageId
    scanned: int
    version: int

    @property
    def count(self) -> int:
        return len(self.messages)


def _split_page(
    page: Sequence[PastMessage], wanted: Collection[MessageId], size: int, version: int
) -> list[_PagePart]:
    """Split a page into parts of at most `size` wanted messages; the last one ends with it."""
    parts: list[list[PastMessage]] = [[]]
    free = size
    for past in page:
        if past.id in wanted:
            if not free:
                parts.append([])
                free = size
            free -= 1
        parts[-1].append(past)
    return [
        _PagePart(
            messages=[past.id for past in part if past.id in wanted],
            last=part[-1].id,
            scanned=len(part),
            version=version,
        )
        for part in parts
        if part
    ]


def _ms(text: str | None) -> int:
    return 0 if text is None else max(0, int(datetime.fromisoformat(text).timestamp() * 1000))
