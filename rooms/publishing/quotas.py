"""Limit what is published: rates, days, sizes and stored messages, without a statement a publish.

Each process keeps the counts in memory. Once a second, one statement adds what the process has
published to the counts of the day, and returns those of all processes. So a limit of a day may be
exceeded by what the other processes accept in that second. A rate is shared out: each process
allows its part, the limit divided by the number of API processes that run.

While no request has a limit, and nothing with a limit of the day was used today, a process looks
each five seconds, and before the next request that has a limit.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Self

from sqlalchemy.exc import SQLAlchemyError

from rooms.db.connection import without_share
from rooms.db.quotas import Published, QuotaState
from rooms.domain.ids import OrganisationId, RoomId
from rooms.domain.quota import (
    QuotaLimit,
    Quotas,
    Subject,
    organisation_subject,
    room_subject,
)
from rooms.errors import QuotaExceededError, QuotaTooLargeError, TransientError
from rooms.outages import OUTAGES
from rooms.publishing.routing import RoutingTable
from rooms.token_buckets import TokenBuckets

_log = logging.getLogger(__name__)

SYNC_S: Final = 1.0
"""Seconds between two statements that add what was published."""
RESTING_SYNC_S: Final = 5.0
"""The same while nothing that has a limit is used."""
STOP_S: Final = 2.0
"""Seconds that a process which stops waits for its last counts to be added."""
STORED_RETRY_S: Final = 30
"""Seconds after which a full store may have room again: it is estimated so often."""
LOOKUPS_PER_S: Final = 10
"""Refused requests of an organisation for which it is looked up each second if they are retries."""
_MAX_BUCKETS: Final = 10_000
_OUTAGE: Final = "counts of quotas failed"

SyncUsed = Callable[[Mapping[Subject, Published], datetime | None], Awaitable[QuotaState]]
OnRefused = Callable[[QuotaLimit], None]


class DebtBucket:
    """Give `per_s` tokens a second. A batch takes all of its tokens at once, if need be on credit.

    A batch that is larger than a second's tokens is taken when the bucket is full, and what it took
    too much delays the next one. So no batch is refused for ever, unless others take all tokens.
    """

    __slots__ = ("_since", "_tokens")

    def __init__(self, per_s: float, now: float) -> None:
        self._tokens = max(per_s, 1.0)
        self._since = now

    def wait_s(self, count: int, per_s: float, now: float) -> float:
        """Return the seconds until `count` tokens may be taken; 0: now."""
        full = max(per_s, 1.0)
        self._tokens = min(full, self._tokens + (now - self._since) * per_s)
        self._since = now
        return max(0.0, (min(float(count), full) - self._tokens) / per_s)

    def take(self, count: int) -> None:
        """Take tokens, or give them back (a negative count)."""
        self._tokens -= count


@dataclass(slots=True)
class Admission:
    """Hold what was taken from the quotas for one request, until it is settled."""

    messages: int
    bytes: int
    buckets: list[DebtBucket] = field(default_factory=list)
    days: list[Subject] = field(default_factory=list)


class QuotaKeeper:
    """Keep the quotas of one process, for as long as it is entered as a context manager."""

    def __init__(
        self,
        sync: SyncUsed,
        monotonic: Callable[[], float],
        *,
        on_refused: OnRefused = lambda _: None,
    ) -> None:
        self._sync_used = sync
        self._monotonic = monotonic
        self._on_refused = on_refused
        self._buckets: dict[Subject, DebtBucket] = {}
        self._used: dict[Subject, Published] = {}
        self._pending: dict[Subject, list[int]] = {}
        self._flushing: Mapping[Subject, Published] = {}
        self._state: QuotaState | None = None
        self._day_ends = 0.0
        self._full: frozenset[Subject] = frozenset()
        self._processes = 1
        self._lookups: TokenBuckets[OrganisationId] = TokenBuckets(LOOKUPS_PER_S, monotonic)
        self._reloads: TokenBuckets[RoomId] = TokenBuckets(1, monotonic)
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._stopping = False
        self._failed = False
        self._lock = asyncio.Lock()
        self._is_resting = False
        self._was_asked = False
        """Something was limited since the last time that the timer looked."""
        self._resuming: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._try_sync()
        self._task = asyncio.create_task(self._sync_until_stopped())
        return self

    async def __aexit__(self, *exc: object) -> None:
        # A statement that is cancelled fails like one that PostgreSQL refuses, so it may end first.
        self._stopping = True
        self._wake.set()
        if tasks := [one for one in (self._task, self._resuming) if one is not None]:
            _, late = await asyncio.wait(tasks, timeout=STOP_S)
            if late:
                for task in late:
                    task.cancel()
                await asyncio.wait(late, timeout=STOP_S)
                return
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._try_sync()

    async def _sync_until_stopped(self) -> None:
        while not self._stopping:
            with suppress(TimeoutError):
                await asyncio.wait_for(
                    self._wake.wait(), RESTING_SYNC_S if self._is_resting else SYNC_S
                )
                self._wake.clear()
                continue
            was_asked, self._was_asked = self._was_asked, False
            is_current = await self._try_sync()
            self._is_resting = is_current and not (
                was_asked or self._was_asked or self._pending or self._used or self._full
            )

    async def resume(self) -> None:
        """Learn what all processes have used, if it is some seconds since the last time.

        To be awaited before `admit`. It takes `SYNC_S` at most, also while PostgreSQL is away.
        """
        self._was_asked = True
        if not self._is_resting:
            return
        if self._resuming is None:
            # For all organisations: it waits for no share of the one that happens to ask.
            with without_share():
                self._resuming = asyncio.create_task(self._look_again())
        await asyncio.wait([self._resuming], timeout=SYNC_S)
        self._end_rest()

    async def _look_again(self) -> None:
        try:
            await self._try_sync()
        finally:
            self._resuming = None
            self._end_rest()

    def _end_rest(self) -> None:
        if self._is_resting:
            self._is_resting = False
            self._wake.set()

    async def _try_sync(self) -> bool:
        try:
            await self.sync()
        except TransientError as exc:
            OUTAGES.record_failure(exc, _OUTAGE)
        except SQLAlchemyError as exc:
            # Another process runs the migration that creates the tables. Publishing goes on, and
            # the next statement adds the counts.
            if not self._failed:
                _log.warning("%s: %s", _OUTAGE, exc)
            self._failed = True
        else:
            OUTAGES.record_success(_OUTAGE)
            self._failed = False
            return True
        return False

    async def sync(self) -> None:
        """Add what was published since the last time, and learn what others have.

        StorageUnavailableError: in doubt, and added again, so that nothing is missing.
        StorageRefusedError: nothing was added.
        """
        async with self._lock:
            pending, self._pending = self._pending, {}
            self._flushing = {
                subject: Published(messages=messages, bytes=size)
                for subject, (messages, size) in pending.items()
                if messages or size
            }
            known = self._state
            try:
                state = await self._sync_used(self._flushing, None if known is None else known.at)
            except BaseException:
                for subject, one in self._flushing.items():
                    self._add(subject, one.messages, one.bytes)
                raise
            finally:
                self._flushing = {}
            if known is not None and known.day != state.day:
                self._used = {}
            self._state = state
            self._day_ends = self._monotonic() + state.day_left_s
            self._used |= state.used
            self._full = state.full_subjects
            self._processes = max(1, state.processes)

    def must_admit(self, publisher: Quotas | None, table: RoutingTable) -> bool:
        """Return whether a quota limits a publish, or the room or its owner may store no more."""
        if publisher is not None or table.quotas is not None:
            return True
        full = self._full
        return bool(full) and (
            room_subject(table.room_id) in full
            or organisation_subject(table.organisation_id) in full
        )

    def may_look_up(self, organisation: OrganisationId) -> bool:
        """Return whether it may be looked up if a refused request is a retry."""
        return self._lookups.take(organisation)

    def may_reload(self, room: RoomId) -> bool:
        """Return whether it may be looked up if a room's quotas were changed: once a second."""
        return self._reloads.take(room)

    def admit(
        self,
        publisher: tuple[OrganisationId, Quotas | None],
        room: tuple[RoomId, Quotas | None],
        owner: OrganisationId,
        payloads: Sequence[int],
    ) -> Admission:
        """Take from the quotas of the publisher and of the room, or nothing at all.

        `owner`: of the room; `payloads`: the size of each.

        QuotaTooLargeError: a payload. QuotaExceededError: anything else; it says when to try again.
        """
        admission = Admission(messages=len(payloads), bytes=sum(payloads))
        limits: list[tuple[Subject, Quotas, str]] = []
        if publisher[1] is not None:
            limits.append((organisation_subject(publisher[0]), publisher[1], "your organisation"))
        if room[1] is not None:
            limits.append((room_subject(room[0]), room[1], "this room"))
        for _, limit, whose in limits:
            _check_payloads(payloads, limit, whose)
        self._check_stored(room[0], owner)
        for subject, limit, whose in limits:
            self._check_day(subject, limit, whose, admission)
        for subject, limit, whose in limits:
            self._check_rate(subject, limit, whose, admission)
        for bucket in admission.buckets:
            bucket.take(admission.messages)
        for subject in admission.days:
            self._add(subject, admission.messages, admission.bytes)
        return admission

    def count_refusal(self, error: QuotaExceededError | QuotaTooLargeError) -> None:
        """Count a request that is refused."""
        self._on_refused(QuotaLimit(error.limit))

    def give_back(self, admission: Admission, messages: int, size: int) -> None:
        """Give back what was taken for messages, of so many bytes, that were not written."""
        for bucket in admission.buckets:
            bucket.take(-messages)
        for subject in admission.days:
            self._add(subject, -messages, -size)

    def _add(self, subject: Subject, messages: int, size: int) -> None:
        counts = self._pending.setdefault(subject, [0, 0])
        counts[0] += messages
        counts[1] += size

    def _check_stored(self, room: RoomId, owner: OrganisationId) -> None:
        if not self._full:
            return
        for subject, whose in (
            (room_subject(room), "this room"),
            (organisation_subject(owner), "the organisation of this room"),
        ):
            if subject in self._full:
                raise QuotaExceededError(
                    f"{whose} stores as many messages as its quota stored_messages allows",
                    limit=QuotaLimit.STORED_MESSAGES,
                    retry_after_s=STORED_RETRY_S,
                )

    def _check_day(
        self, subject: Subject, quotas: Quotas, whose: str, admission: Admission
    ) -> None:
        if not quotas.counts_days:
            return
        messages, size = self._used_today(subject)
        for limit, most, used, wanted in (
            (QuotaLimit.MESSAGES_PER_DAY, quotas.messages_per_day, messages, admission.messages),
            (QuotaLimit.BYTES_PER_DAY, quotas.bytes_per_day, size, admission.bytes),
        ):
            if most is not None and used + wanted > most:
                left_s = max(1, math.ceil(self._day_ends - self._monotonic()))
                # What others have published into a room is no business of a publisher.
                raise QuotaExceededError(
                    f"the quota {limit} of {whose} is {most}, of a day of UTC;"
                    f" this request has {wanted}, and less is left",
                    limit=limit,
                    retry_after_s=left_s,
                )
        admission.days.append(subject)

    def _used_today(self, subject: Subject) -> tuple[int, int]:
        messages, size = self._pending.get(subject, (0, 0))
        # When the day ends, nothing of the new one is known until the next statement.
        for counts in (self._used, self._flushing):
            known = counts.get(subject)
            if known is not None and self._monotonic() < self._day_ends:
                messages, size = messages + known.messages, size + known.bytes
        return messages, size

    def _check_rate(
        self, subject: Subject, quotas: Quotas, whose: str, admission: Admission
    ) -> None:
        if quotas.messages_per_s is None:
            return
        share, now = quotas.messages_per_s / self._processes, self._monotonic()
        bucket = self._buckets.get(subject)
        if bucket is None:
            if len(self._buckets) >= _MAX_BUCKETS:
                del self._buckets[next(iter(self._buckets))]
            bucket = self._buckets[subject] = DebtBucket(share, now)
        wait_s = bucket.wait_s(admission.messages, share, now)
        if wait_s > 0:
            raise QuotaExceededError(
                f"the quota messages_per_s of {whose} is {quotas.messages_per_s}",
                limit=QuotaLimit.MESSAGES_PER_S,
                retry_after_s=max(1, math.ceil(wait_s)),
            )
        admission.buckets.append(bucket)


def _check_payloads(payloads: Sequence[int], quotas: Quotas, whose: str) -> None:
    most = quotas.payload_bytes
    if most is None:
        return
    for index, size in enumerate(payloads):
        if size > most:
            place = f"messages[{index}]." if len(payloads) > 1 else ""
            raise QuotaTooLargeError(
                f"{place}payload: {size} bytes; the quota payload_bytes of {whose} is {most}",
                limit=QuotaLimit.PAYLOAD_BYTES,
            )
