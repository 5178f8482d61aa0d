"""Commit requests in groups: those that arrive during a commit share the next one.

A large request is a group of its own, and would hold up all others for as long as it takes: those
of more than `LARGE_ROWS` or `LARGE_BYTES` have a connection of their own.

Of requests with the same idempotency key or caller id, only the first is written. Its outcome is
that of the others, as far as it decides them; else the next one is written.
"""

import asyncio
import functools
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
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
from rooms.publishing.request_queues import MAX_ROWS, PendingRequest, RequestQueues

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
PACED_ROWS: Final = 500
"""Most rows of a group of bulk work while it is paced: the commits of others wait for its bytes."""
LARGE_ROWS: Final = 200
"""A request with more messages and deliveries is large."""
LARGE_BYTES: Final = 1024 * 1024
"""A request with more bytes of payload is large."""
_MAX_ROUNDS: Final = 8
_MAX_REFUSALS: Final = 3
_MAX_LOCKED_ROOMS: Final = 2
"""After so many rooms of an organisation in a group waited in vain, its others are not tried."""
_NEARLY_ALL: Final = 0.75
"""The part of the expected requests for which a wait was not in vain."""
_PER_MISS: Final = 2
"""A wait in vain counts as much as two that were not."""
_MAX_MISSES: Final = 5
"""With so many, one commit in 32 waits."""

WriteGroup = Callable[[Sequence[InsertRows]], Awaitable[InsertConflict]]


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
        is_contended: bool = False,
    ) -> None:
        """Set callbacks: after the commit of a group, and after a write that PostgreSQL refused.

        `pacer`: records organisations, and paces groups if these are bulk work.
        `choose_for_contended` returns the committer of a room's requests that waited for a lock for
        too long, which must stay open for longer than this one; None: these fail. `is_contended`:
        this is such a committer. Its groups are of one room each, and fail as a whole where they
        wait for a lock in vain: the next room has waited as long.
        """
        self._write = write
        self._on_commit = on_commit
        self._on_failure = on_failure
        self._pacer = pacer or BurstPacer()
        self._is_bulk = is_bulk
        self._choose_for_contended = choose_for_contended
        self._is_contended = is_contended
        self._rooms: Counter[RoomId] = Counter()
        """Requests that wait or are being committed, by room, if this is for contended ones."""
        self._handed_over = 0
        """Requests that another committer has, whose outcomes this one reports."""
        self._rests_of: frozenset[OrganisationId | None] = frozenset()
        """The organisations of the last group, while groups rest."""
        self._rest_ended = asyncio.Event()
        self._queues = RequestQueues()
        self._waiting_bytes = 0
        """Of the queues, and of requests behind another one with the same key or id."""
        self._keys: UniqueKeys[PendingRequest] = UniqueKeys()
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
        one = PendingRequest(submission, settle)
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

    def _may_wait(self, one: PendingRequest) -> bool:
        """Return whether the bounds of what waits leave room for a further request."""
        organisation, behind = one.submission.organisation, self._bytes_behind
        own_bytes = behind[organisation] + self._queues.bytes_of(organisation)
        organisations = len(self._queues.organisations | behind.keys() | {organisation})
        return pending_requests.may_wait(one.size, own_bytes, self._waiting_bytes, organisations)

    def _enqueue(self, one: PendingRequest) -> None:
        self._queues.add(one)
        if self._is_contended:
            self._rooms[one.submission.room_id] += 1
        self._has_work.set()
        if self._expected and self._queues.count >= self._expected:
            self._group_ready.set()
        if self._rests_of and one.submission.organisation not in self._rests_of:
            self._rest_ended.set()

    def _take_keys_or_wait(
        self, one: PendingRequest, behind: Sequence[PendingRequest] = ()
    ) -> None:
        """Queue a request, or let it wait for another one; those `behind` wait for it already."""
        if self._keys.take(one, one.submission.unique_keys(), behind):
            self._enqueue(one)
        else:
            self._bytes_behind[one.submission.organisation] += one.size

    async def _run(self) -> None:
        while True:
            if not self._queues:
                if self._closing and not self._handed_over:
                    return
                self._has_work.clear()
                await self._has_work.wait()
            await self._linger()
            if group := self._next_group():
                is_full = bool(self._queues)
                began = self._loop.time()
                await self._commit_or_divide(group)
                if self._is_contended:
                    self._forget_room(group)
                self._ended_at = self._loop.time()
                self._commit_s = self._ended_at - began
                # What did not fit into a group need not wait for more.
                self._last_group_size = len(group) + (0 if is_full else self._queues.count)
                for organisation in dict.fromkeys(one.submission.organisation for one in group):
                    self._pacer.note(organisation)
                if self._is_bulk and (rest_s := self._pacer.rest_s(self._commit_s)):
                    await self._rest(rest_s, group)

    async def _rest(self, rest_s: float, group: Sequence[PendingRequest]) -> None:
        """Let groups rest, until a request of an organisation waits that had none in the last."""
        organisations = frozenset(one.submission.organisation for one in group)
        if self._closing or self._queues.organisations - organisations:
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
        if self._queues.count >= self._last_group_size or left_s <= 0 or self._closing:
            return
        if self._to_skip:
            self._to_skip -= 1
            return
        self._group_ready.clear()
        self._expected = self._last_group_size
        timer = self._loop.call_later(left_s, self._group_ready.set)
        await self._group_ready.wait()
        timer.cancel()
        if self._queues.count >= _NEARLY_ALL * self._expected:
            self._misses = max(0, self._misses - 1)
        else:
            self._to_skip = 2**self._misses - 1
            self._misses = min(self._misses + _PER_MISS, _MAX_MISSES)
        self._expected = 0

    def _next_group(self) -> list[PendingRequest]:
        """Take the next group. No two that are queued have a key or caller id in common."""
        if self._is_contended:
            group = self._queues.take_group_of_a_room(MAX_ROWS)
        else:
            is_paced = self._is_bulk and self._pacer.is_pacing
            group = self._queues.take_group(PACED_ROWS if is_paced else MAX_ROWS)
        self._waiting_bytes -= sum(one.size for one in group)
        return group

    async def _commit_or_divide(self, group: list[PendingRequest]) -> None:
        """Commit a group, or parts of it if it fails, so that only what is at fault fails."""
        refusals = 0
        locked_rooms: Counter[OrganisationId | None] = Counter()
        parts = deque([group])
        while parts:
            part = parts.popleft()
            error = await self._try_commit(part)
            if error is None:
                refusals = 0
                continue
            part = [one for one in part if not one.is_settled]
            if not part:
                continue
            if isinstance(error, LockTimeoutError) and self._choose_for_contended is not None:
                self._pass_on(part, parts, locked_rooms)
                continue
            is_locked = isinstance(error, LockTimeoutError) and self._is_contended
            if len(part) > 1 and not is_locked and not isinstance(error, StorageUnavailableError):
                # A refusal by PostgreSQL is logged where the request is answered.
                if not isinstance(error, StorageRefusedError):
                    _log.warning("%s publishes failed, and are tried singly: %s", len(part), error)
                parts.extendleft([one] for one in reversed(part))
                continue
            self._fail(part, error)
            refusals += isinstance(error, StorageRefusedError)
            # PostgreSQL refuses everything: no request is at fault, and the others must not wait.
            if refusals == _MAX_REFUSALS or isinstance(error, StorageUnavailableError):
                for other in parts:
                    self._fail(other, error)
                return

    def _pass_on(
        self,
        part: list[PendingRequest],
        parts: deque[list[PendingRequest]],
        locked_rooms: Counter[OrganisationId | None],
    ) -> None:
        """Divide what waited for a lock by organisation, then by room: locks are a room's.

        Those of a single room go to another committer, and after some rooms in vain all others of
        the organisation, too: it must not delay the rest of the group room by room.
        """
        of_organisations = _divide(part, lambda submission: submission.organisation)
        of_rooms = _divide(part, lambda submission: submission.room_id)
        if len(of_organisations) > 1 or len(of_rooms) > 1:
            divided = of_organisations if len(of_organisations) > 1 else of_rooms
            parts.extendleft(reversed(divided))
            return
        organisation = part[0].submission.organisation
        locked_rooms[organisation] += 1
        if locked_rooms[organisation] >= _MAX_LOCKED_ROOMS:
            while parts and parts[0][0].submission.organisation == organisation:
                part += parts.popleft()
        self._hand_over(part)

    def _hand_over(self, part: Sequence[PendingRequest]) -> None:
        """Give requests to another committer, and those of their rooms that wait behind them."""
        if self._choose_for_contended is None:
            raise AssertionError("there is no committer for contended requests")
        rooms = {one.submission.room_id for one in part}
        waiting = self._queues.take_locking(rooms)
        self._waiting_bytes -= sum(one.size for one in waiting)
        chosen = {room: self._choose_for_contended(room) for room in rooms}
        for one in (*part, *waiting):
            other = chosen[one.submission.room_id]
            try:
                other.submit_nowait(one.submission, functools.partial(self._on_handed_over, one))
            except StorageRefusedError as exc:
                self._settle(one, exc)
            else:
                self._handed_over += 1

    def _forget_room(self, group: Sequence[PendingRequest]) -> None:
        room = group[0].submission.room_id
        self._rooms[room] -= len(group)
        if not self._rooms[room]:
            del self._rooms[room]

    def has_work_in(self, room: RoomId) -> bool:
        """Return whether a room's requests are not committed yet, if this is for contended ones."""
        return self._rooms[room] > 0

    def _on_handed_over(self, one: PendingRequest, outcome: CommitOutcome | Exception) -> None:
        self._handed_over -= 1
        self._settle(one, outcome)
        self._has_work.set()

    def _fail(self, group: Iterable[PendingRequest], error: Exception) -> None:
        for one in group:
            self._settle(one, error)

    async def _try_commit(self, group: list[PendingRequest]) -> Exception | None:
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

    async def _commit(self, group: list[PendingRequest]) -> None:
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

    def _settle(self, one: PendingRequest, outcome: CommitOutcome | Exception) -> None:
        if not one.is_settled:
            self._release(one, outcome)
            one.settle(outcome)

    def _release(self, one: PendingRequest, outcome: CommitOutcome | Exception) -> None:
        """Settle the requests that waited for this outcome, and queue the first that it leaves."""
        used_ids = find_used_ids(one.submission, outcome)
        decided: list[tuple[PendingRequest, CommitOutcome | Exception]] = []
        rest: deque[PendingRequest] = deque()
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

    def _forget_behind(self, one: PendingRequest) -> None:
        organisation = one.submission.organisation
        self._bytes_behind[organisation] -= one.size
        if not self._bytes_behind[organisation]:
            del self._bytes_behind[organisation]


def _divide(
    part: Iterable[PendingRequest], key: Callable[[InsertRows], Hashable]
) -> list[list[PendingRequest]]:
    divided: dict[Hashable, list[PendingRequest]] = {}
    for one in part:
        divided.setdefault(key(one.submission), []).append(one)
    return list(divided.values())


def _settle_committed(group: Iterable[PendingRequest]) -> None:
    for one in group:
        one.settle(None)


def _settle_decided(
    decided: Iterable[tuple[PendingRequest, CommitOutcome | Exception]],
) -> None:
    for one, outcome in decided:
        one.settle(outcome)
