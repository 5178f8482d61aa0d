"""Commit requests in groups: those that arrive during a commit share the next one.

Organisations take turns, one request each, so the requests of one do not fill the groups that
another waits for. A large request is a group of its own, and would hold up all others for as long
as it takes: those of more than `LARGE_ROWS` or `LARGE_BYTES` have a connection of their own.

Of requests with the same idempotency key or caller id, only the first is written. Its outcome is
that of the others, as far as it decides them; else the next one is written.
"""

import asyncio
import functools
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, Self

from rooms.burst_pacing import BurstPacer
from rooms.db.publish.insert import InsertConflict
from rooms.db.publish.request_rows import InsertRows
from rooms.domain.ids import OrganisationId, RoomId
from rooms.errors import (
    LockTimeoutError,
    StorageRefusedError,
    StorageUnavailableError,
    TransientError,
)
from rooms.publishing import pending_requests
from rooms.publishing.commit_outcomes import (
    CommitOutcome,
    Settle,
    decide_follower,
    find_conflict,
    find_used_ids,
)
from rooms.publishing.pending_requests import UniqueKeys

_log = logging.getLogger(__name__)

LINGER_S: Final = 0.003
"""Longest time that a commit waits for the publishers of the last one to come back.

The wait ends as soon as there are as many requests as last time. A commit costs as much as twenty
messages in it do.
"""
MAX_LINGER_S: Final = 0.006
"""The same where commits are slow: half of what the last one took, up to this.

Then the machine or its disk is busy, clients take longer to come back, and each commit that is
saved counts.
"""
MAX_ROWS: Final = 2_000
PACED_ROWS: Final = 500
"""The same of bulk work, while it is paced: the commits of others wait for its bytes."""
MAX_BYTES: Final = 4 * 1024 * 1024
LARGE_ROWS: Final = 200
"""A request with more messages and deliveries is large."""
LARGE_BYTES: Final = 1024 * 1024
"""A request with more bytes of payload is large."""
_OVERHEAD_BYTES: Final = 1024
"""A request takes about so many bytes beside payloads, and so does each message or delivery."""
_MAX_ROUNDS: Final = 8
_MAX_REFUSALS: Final = 3
_NEARLY_ALL: Final = 0.75
"""The part of the expected requests for which a wait was not in vain."""
_PER_MISS: Final = 2
"""A wait in vain counts as much as two that were not."""
_MAX_MISSES: Final = 5
"""With so many, one commit in 32 waits."""

WriteGroup = Callable[[Sequence[InsertRows]], Awaitable[InsertConflict]]


class _PendingSubmission:
    __slots__ = ("_settle", "is_settled", "size", "submission")

    def __init__(self, submission: InsertRows, settle: Settle) -> None:
        self.submission = submission
        self.is_settled = False
        self.size = submission.payload_bytes + _OVERHEAD_BYTES * (1 + submission.row_count)
        self._settle = settle

    def settle(self, outcome: CommitOutcome | Exception) -> None:
        """Report the outcome once. An error of the callee must not look like one of the commit."""
        if self.is_settled:
            return
        self.is_settled = True
        try:
            self._settle(outcome)
        except Exception:  # noqa: BLE001 - the others of the group are answered all the same
            _log.exception("the outcome of a publish could not be reported")


class _OrganisationQueue(deque[_PendingSubmission]):
    """Queue the requests of one organisation."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0


def is_large(submission: InsertRows) -> bool:
    """Return whether a request would hold up others for too long on their connection."""
    return submission.row_count > LARGE_ROWS or submission.payload_bytes > LARGE_BYTES


class GroupCommitter:
    """Commit groups of requests with `write`, one group at a time.

    An async context manager: leaving it commits every request that was submitted.
    """

    def __init__(
        self,
        write: WriteGroup,
        *,
        on_commit: Callable[[Sequence[InsertRows]], None],
        on_failure: Callable[[], None] = lambda: None,
        pacer: BurstPacer | None = None,
        is_bulk: bool = False,
        choose_for_contended: "Callable[[RoomId], GroupCommitter] | None" = None,
    ) -> None:
        """Set callbacks: after the commit of a group, and after a write that PostgreSQL refused.

        `pacer`: records organisations, and paces groups if these are bulk work.
        `choose_for_contended` returns the committer of a room's requests that waited for a lock for
        too long, which must stay open for longer than this one; None: these fail.
        """
        self._write = write
        self._on_commit = on_commit
        self._on_failure = on_failure
        self._pacer = pacer or BurstPacer()
        self._is_bulk = is_bulk
        self._choose_for_contended = choose_for_contended
        self._handed_over = 0
        """Requests that another committer has, whose outcomes this one reports."""
        self._rests_of: frozenset[OrganisationId | None] = frozenset()
        """The organisations of the last group, while groups rest."""
        self._rest_ended = asyncio.Event()
        self._waiting: dict[OrganisationId | None, _OrganisationQueue] = {}
        """By publisher, in the order of their turns; none is empty."""
        self._waiting_count = 0
        self._waiting_bytes = 0
        """Of the queues, and of requests behind another one with the same key or id."""
        self._keys: UniqueKeys[_PendingSubmission] = UniqueKeys()
        self._bytes_behind: Counter[OrganisationId | None] = Counter()
        self._has_work = asyncio.Event()
        self._group_ready = asyncio.Event()
        self._expected = 0
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._last_group_size = 0
        self._misses = 0
        """Waits in vain, `_PER_MISS` each, minus those that were not; never below 0."""
        self._to_skip = 0
        """Groups until the next wait."""
        self._commit_s = 0.0
        self._ended_at = -MAX_LINGER_S
        """End of the last commit, when it was answered."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Accept no more requests, and commit those that were submitted."""
        self._closing = True
        self._has_work.set()
        self._group_ready.set()
        self._rest_ended.set()
        if self._task is not None:
            await self._task
            self._task = None

    async def submit(self, submission: InsertRows) -> CommitOutcome:
        """Commit a request and return its outcome. Cancelling this does not cancel the commit.

        StorageUnavailableError: it may have been committed. StorageRefusedError: it was not, and a
        retry may succeed.
        """
        future: asyncio.Future[CommitOutcome] = self._loop.create_future()

        def settle(outcome: CommitOutcome | Exception) -> None:
            if future.done():
                return
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self.submit_nowait(submission, settle)
        return await future

    def submit_nowait(self, submission: InsertRows, settle: Settle) -> None:
        """Commit a request later, and call `settle`, never before this returns.

        StorageRefusedError: it is not submitted.
        """
        if self._closing or self._task is None:
            raise StorageRefusedError("publishing is shutting down")
        one = _PendingSubmission(submission, settle)
        # One that waits for no other is always accepted, whatever its size.
        if (
            self._waiting_bytes
            and self._waiting_bytes + one.size > pending_requests.MAX_WAITING_BYTES
            and not self._may_wait(one)
        ):
            raise StorageRefusedError("too many publishes are waiting to be written")
        self._waiting_bytes += one.size
        if submission.key is None and not submission.caller_ids:
            self._enqueue(one)
        else:
            self._take_keys_or_wait(one)

    def _may_wait(self, one: _PendingSubmission) -> bool:
        """Return whether the bounds of what waits leave room for a further request."""
        organisation, behind = one.submission.organisation, self._bytes_behind
        own_bytes = behind[organisation]
        if (queue := self._waiting.get(organisation)) is not None:
            own_bytes += queue.bytes
        organisations = len(self._waiting.keys() | behind.keys() | {organisation})
        return pending_requests.may_wait(one.size, own_bytes, self._waiting_bytes, organisations)

    def _enqueue(self, one: _PendingSubmission) -> None:
        queue = self._waiting.get(one.submission.organisation)
        if queue is None:
            queue = self._waiting[one.submission.organisation] = _OrganisationQueue()
        queue.append(one)
        queue.bytes += one.size
        self._waiting_count += 1
        self._has_work.set()
        if self._expected and self._waiting_count >= self._expected:
            self._group_ready.set()
        if self._rests_of and one.submission.organisation not in self._rests_of:
            self._rest_ended.set()

    def _take_keys_or_wait(
        self, one: _PendingSubmission, behind: Sequence[_PendingSubmission] = ()
    ) -> None:
        """Queue a request, or let it wait for another one; those `behind` wait for it already."""
        if self._keys.take(one, one.submission.unique_keys(), behind):
            self._enqueue(one)
        else:
            self._bytes_behind[one.submission.organisation] += one.size

    async def _run(self) -> None:
        while True:
            if not self._waiting:
                if self._closing and not self._handed_over:
                    return
                self._has_work.clear()
                await self._has_work.wait()
            await self._linger()
            if group := self._next_group():
                is_full = bool(self._waiting)
                began = self._loop.time()
                await self._commit_or_retry_singly(group)
                self._ended_at = self._loop.time()
                self._commit_s = self._ended_at - began
                # What did not fit into a group need not wait for more.
                self._last_group_size = len(group) + (0 if is_full else self._waiting_count)
                for organisation in dict.fromkeys(one.submission.organisation for one in group):
                    self._pacer.note(organisation)
                if self._is_bulk and (rest_s := self._pacer.rest_s(self._commit_s)):
                    await self._rest(rest_s, group)

    async def _rest(self, rest_s: float, group: Sequence[_PendingSubmission]) -> None:
        """Let groups rest, until a request of an organisation waits that had none in the last."""
        organisations = frozenset(one.submission.organisation for one in group)
        if self._closing or self._waiting.keys() - organisations:
            return
        self._rests_of = organisations
        self._rest_ended.clear()
        timer = self._loop.call_later(rest_s, self._rest_ended.set)
        await self._rest_ended.wait()
        timer.cancel()
        self._rests_of = frozenset()

    async def _linger(self) -> None:
        """Wait until as many requests are here as last time, if it was not in vain before.

        Those who were answered together come back together. Without the wait they stay in two
        halves for ever, each of which waits while the other is committed. The wait begins with the
        answers: a publisher that comes later was not among them.
        """
        longest_s = max(LINGER_S, min(self._commit_s / 2, MAX_LINGER_S))
        left_s = self._ended_at + longest_s - self._loop.time()
        if self._waiting_count >= self._last_group_size or left_s <= 0 or self._closing:
            return
        if self._to_skip:
            self._to_skip -= 1
            return
        self._group_ready.clear()
        self._expected = self._last_group_size
        timer = self._loop.call_later(left_s, self._group_ready.set)
        await self._group_ready.wait()
        timer.cancel()
        if self._waiting_count >= _NEARLY_ALL * self._expected:
            self._misses = max(0, self._misses - 1)
        else:
            self._to_skip = 2**self._misses - 1
            self._misses = min(self._misses + _PER_MISS, _MAX_MISSES)
        self._expected = 0

    def _next_group(self) -> list[_PendingSubmission]:
        """Return the next group: organisations in turn, the requests of each in order of arrival.

        No two that are queued have a key or caller id in common.
        """
        group: list[_PendingSubmission] = []
        rows = size = 0
        most_rows = PACED_ROWS if self._is_bulk and self._pacer.is_pacing else MAX_ROWS
        waiting = self._waiting
        while waiting:
            organisation, queue = next(iter(waiting.items()))
            one = queue[0]
            row_count = one.submission.row_count
            if group and (rows + row_count > most_rows or size + one.size > MAX_BYTES):
                break
            queue.popleft()
            if not queue:
                del waiting[organisation]
            elif len(waiting) > 1:
                waiting[organisation] = waiting.pop(organisation)
            queue.bytes -= one.size
            group.append(one)
            rows += row_count
            size += one.size
        self._waiting_count -= len(group)
        self._waiting_bytes -= size
        return group

    async def _commit_or_retry_singly(self, group: list[_PendingSubmission]) -> None:
        """Commit a group, or its requests one by one if it fails, so that only a bad one fails."""
        error = await self._try_commit(group)
        if error is None:
            return
        if self._may_wait_elsewhere(error):
            await self._part_by_room(group)
            return
        if len(group) == 1 or isinstance(error, StorageUnavailableError):
            self._fail(group, error)
            return
        # A refusal by PostgreSQL is logged where the request is answered.
        if not isinstance(error, StorageRefusedError):
            _log.warning(
                "a group of %s publishes failed, retrying one by one: %s", len(group), error
            )
        refusals = 0
        rest = deque(one for one in group if not one.is_settled)
        while rest:
            one = rest.popleft()
            error = await self._try_commit([one])
            if error is None:
                refusals = 0
                continue
            if self._may_wait_elsewhere(error):
                self._hand_over(one.submission.room_id, [one])
                continue
            self._fail([one], error)
            refusals += isinstance(error, StorageRefusedError)
            # PostgreSQL refuses everything: no request is at fault, and the others must not wait.
            if refusals == _MAX_REFUSALS or isinstance(error, StorageUnavailableError):
                self._fail(rest, error)
                return

    def _may_wait_elsewhere(self, error: Exception) -> bool:
        return isinstance(error, LockTimeoutError) and self._choose_for_contended is not None

    async def _part_by_room(self, group: Iterable[_PendingSubmission]) -> None:
        """Commit each room's requests of a group that waited for a lock: locks are a room's.

        Those of a single room go to another committer.
        """
        by_room: dict[RoomId, list[_PendingSubmission]] = {}
        for one in group:
            if not one.is_settled:
                by_room.setdefault(one.submission.room_id, []).append(one)
        if len(by_room) > 1:
            for part in by_room.values():
                await self._commit_or_retry_singly(part)
            return
        for room, part in by_room.items():
            self._hand_over(room, part)

    def _hand_over(self, room: RoomId, part: Iterable[_PendingSubmission]) -> None:
        if self._choose_for_contended is None:
            raise AssertionError("there is no committer for contended requests")
        other = self._choose_for_contended(room)
        for one in part:
            try:
                other.submit_nowait(one.submission, functools.partial(self._on_handed_over, one))
            except StorageRefusedError as exc:
                self._settle(one, exc)
            else:
                self._handed_over += 1

    def _on_handed_over(self, one: _PendingSubmission, outcome: CommitOutcome | Exception) -> None:
        self._handed_over -= 1
        self._settle(one, outcome)
        self._has_work.set()

    def _fail(self, group: Iterable[_PendingSubmission], error: Exception) -> None:
        for one in group:
            self._settle(one, error)

    async def _try_commit(self, group: list[_PendingSubmission]) -> Exception | None:
        """Commit a group. Return an error, which was not reported to its requests."""
        try:
            await self._commit(group)
        except Exception as exc:  # noqa: BLE001 - the callers raise it
            return exc
        return None

    def _report_commit(self, submissions: Sequence[InsertRows]) -> None:
        try:
            self._on_commit(submissions)
        except Exception:  # noqa: BLE001 - the group is written, and must not be written once more
            _log.exception("a committed group of publishes was not counted or announced")

    async def _commit(self, group: list[_PendingSubmission]) -> None:
        for _ in range(_MAX_ROUNDS):
            submissions = [one.submission for one in group]
            try:
                verdict = await self._write(submissions)
            except TransientError:
                self._on_failure()
                raise
            if not verdict.has_conflict:
                self._report_commit(submissions)
                # Answers are written while PostgreSQL has the next group.
                self._loop.call_soon(_settle_committed, group)
                if self._keys:
                    for one in group:
                        if one.submission.key is not None or one.submission.caller_ids:
                            self._release(one, None)
                return
            rest = []
            for one in group:
                if (conflict := find_conflict(one.submission, verdict)) is None:
                    rest.append(one)
                else:
                    self._settle(one, conflict)
            group = rest
            if not group:
                return
        raise StorageRefusedError("other requests keep taking the same idempotency keys or ids")

    def _settle(self, one: _PendingSubmission, outcome: CommitOutcome | Exception) -> None:
        if not one.is_settled:
            self._release(one, outcome)
            one.settle(outcome)

    def _release(self, one: _PendingSubmission, outcome: CommitOutcome | Exception) -> None:
        """Settle the requests that waited for this outcome, and queue the first that it leaves."""
        used_ids = find_used_ids(one.submission, outcome)
        decided: list[tuple[_PendingSubmission, CommitOutcome | Exception]] = []
        rest: deque[_PendingSubmission] = deque()
        for follower in self._keys.release(one):
            found = decide_follower(follower.submission, one.submission, outcome, used_ids)
            if found is None:
                rest.append(follower)
            else:
                self._waiting_bytes -= follower.size
                self._forget_behind(follower)
                decided.append((follower, found))
        if decided:
            self._loop.call_soon(_settle_decided, decided)
        if rest:
            first = rest.popleft()
            self._forget_behind(first)
            self._take_keys_or_wait(first, rest)

    def _forget_behind(self, one: _PendingSubmission) -> None:
        organisation = one.submission.organisation
        self._bytes_behind[organisation] -= one.size
        if not self._bytes_behind[organisation]:
            del self._bytes_behind[organisation]


def _settle_committed(group: Iterable[_PendingSubmission]) -> None:
    for one in group:
        one.settle(None)


def _settle_decided(
    decided: Iterable[tuple[_PendingSubmission, CommitOutcome | Exception]],
) -> None:
    for one, outcome in decided:
        one.settle(outcome)
