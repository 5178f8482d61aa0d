"""Commit requests in groups: those that arrive during a commit share the next one.

Organisations take turns, one request each, so the requests of one do not fill the groups that
another waits for. A large request is a group of its own, and would hold up all others for as long
as it takes: those of more than `LARGE_ROWS` have a connection of their own.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from rooms.db.publish.insert import InsertConflict
from rooms.db.publish.request_rows import InsertRows
from rooms.domain.ids import OrganisationId, RoomId
from rooms.errors import StorageRefusedError, StorageUnavailableError, TransientError

_log = logging.getLogger(__name__)

LINGER_S: Final = 0.003
"""Longest time that a commit waits for more requests, while many arrive.

The wait ends as soon as there are as many requests as last time. A commit costs as much as twenty
messages in it do.
"""
MAX_ROWS: Final = 2_000
MAX_BYTES: Final = 4 * 1024 * 1024
LARGE_ROWS: Final = 200
"""A request with more messages and deliveries is large."""
MAX_WAITING_BYTES: Final = 128 * 1024 * 1024
"""Above it requests are refused, as PostgreSQL does not keep up; for each of the connections."""
_OVERHEAD_BYTES: Final = 1024
_MAX_ROUNDS: Final = 8
_MAX_REFUSALS: Final = 3
_SMOOTHING: Final = 0.2

WriteGroup = Callable[[Sequence[InsertRows]], Awaitable[InsertConflict]]


class PlanChanged:
    """Report that the routing table is stale, and the request must be routed again."""


@dataclass(frozen=True, slots=True)
class KeyReused:
    """Report that another request has the idempotency key, with its hash and its answer."""

    request_hash: bytes
    answer: bytes


@dataclass(frozen=True, slots=True)
class IdReused:
    """Report caller ids that messages have already: the content hash and the answer of each."""

    answers: Mapping[str, tuple[bytes, bytes]]


CommitOutcome = PlanChanged | KeyReused | IdReused | None
"""None: committed."""
PLAN_CHANGED: Final = PlanChanged()


Settle = Callable[[CommitOutcome | Exception], None]
"""Called once, with the outcome of a request or the error of its commit."""


class _PendingSubmission:
    __slots__ = ("_settle", "is_settled", "size", "submission")

    def __init__(self, submission: InsertRows, settle: Settle) -> None:
        self.submission = submission
        self.is_settled = False
        self.size = submission.payload_bytes + _OVERHEAD_BYTES * submission.row_count
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
    ) -> None:
        """Set callbacks: after the commit of a group, and after a write that PostgreSQL refused."""
        self._write = write
        self._on_commit = on_commit
        self._on_failure = on_failure
        self._waiting: dict[OrganisationId | None, deque[_PendingSubmission]] = {}
        """By publisher, in the order of their turns; none is empty."""
        self._waiting_count = self._waiting_bytes = 0
        self._has_work = asyncio.Event()
        self._group_ready = asyncio.Event()
        self._expected = 0
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._last_arrival = 0.0
        self._mean_gap_s = 1.0
        self._last_group_size = 0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Accept no more requests, and commit those that were submitted."""
        self._closing = True
        self._has_work.set()
        self._group_ready.set()
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
        if self._waiting_bytes > MAX_WAITING_BYTES:
            raise StorageRefusedError("too many publishes are waiting to be written")
        waiting = _PendingSubmission(submission, settle)
        now = self._loop.time()
        self._mean_gap_s += _SMOOTHING * (min(now - self._last_arrival, 1.0) - self._mean_gap_s)
        self._last_arrival = now
        queue = self._waiting.get(submission.organisation)
        if queue is None:
            queue = self._waiting[submission.organisation] = deque()
        queue.append(waiting)
        self._waiting_count += 1
        self._waiting_bytes += waiting.size
        self._has_work.set()
        if self._expected and self._waiting_count >= self._expected:
            self._group_ready.set()

    async def _run(self) -> None:
        while True:
            if not self._waiting:
                if self._closing:
                    return
                self._has_work.clear()
                await self._has_work.wait()
            await self._linger()
            if group := self._next_group():
                await self._commit_or_retry_singly(group)
                self._last_group_size = len(group) + self._waiting_count

    async def _linger(self) -> None:
        # A single publisher waits for its answer before its next request, so waiting is in vain.
        # Otherwise as many requests are expected as last time, and the wait ends with the last.
        if (
            self._last_group_size <= 1
            or self._mean_gap_s > LINGER_S / 2
            or self._waiting_count >= self._last_group_size
        ):
            return
        if self._closing:
            return
        self._group_ready.clear()
        self._expected = self._last_group_size
        timer = self._loop.call_later(LINGER_S, self._group_ready.set)
        await self._group_ready.wait()
        timer.cancel()
        self._expected = 0

    def _next_group(self) -> list[_PendingSubmission]:
        """Return the next group: organisations in turn, the requests of each in order of arrival.

        Requests with the same key or caller id are in different groups: the second must find the
        first committed.
        """
        group: list[_PendingSubmission] = []
        later: list[_PendingSubmission] = []
        claimed: set[tuple[RoomId, str, str | None]] = set()
        rows = size = 0
        waiting = self._waiting
        while waiting:
            organisation, queue = next(iter(waiting.items()))
            one = queue[0]
            submission = one.submission
            if group and (rows + submission.row_count > MAX_ROWS or size + one.size > MAX_BYTES):
                break
            queue.popleft()
            if not queue:
                del waiting[organisation]
            elif len(waiting) > 1:
                waiting[organisation] = waiting.pop(organisation)
            if submission.key is not None or submission.caller_ids:
                claims = submission.unique_claims()
                if not claimed.isdisjoint(claims):
                    later.append(one)
                    continue
                claimed.update(claims)
            group.append(one)
            rows += submission.row_count
            size += one.size
        for one in reversed(later):
            waiting.setdefault(one.submission.organisation, deque()).appendleft(one)
        self._waiting_count -= len(group)
        self._waiting_bytes -= sum(one.size for one in group)
        return group

    async def _commit_or_retry_singly(self, group: list[_PendingSubmission]) -> None:
        """Commit a group, or its requests one by one if it fails, so that only a bad one fails."""
        error = await self._try_commit(group)
        if error is None:
            return
        if len(group) == 1 or isinstance(error, StorageUnavailableError):
            _fail(group, error)
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
            _fail([one], error)
            refusals += isinstance(error, StorageRefusedError)
            # PostgreSQL refuses everything: no request is at fault, and the others must not wait.
            if refusals == _MAX_REFUSALS or isinstance(error, StorageUnavailableError):
                _fail(rest, error)
                return

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
                return
            group = [one for one in group if not _resolve_conflict(one, verdict)]
            if not group:
                return
        raise StorageRefusedError("other requests keep taking the same idempotency keys or ids")


def _resolve_conflict(one: _PendingSubmission, verdict: InsertConflict) -> bool:
    submission = one.submission
    if submission.key is not None and (
        taken := verdict.used_keys.get((submission.room_id, submission.key))
    ):
        one.settle(KeyReused(*taken))
        return True
    if submission.caller_ids and verdict.used_ids:
        names = [name.caller_id for name in submission.caller_ids]
        answers = {
            name: found
            for name in names
            if (found := verdict.used_ids.get((submission.room_id, name))) is not None
        }
        if answers:
            one.settle(IdReused(answers))
            return True
    if (submission.room_id, submission.plan_version) in verdict.stale_plans:
        one.settle(PLAN_CHANGED)
        return True
    return False


def _settle_committed(group: Iterable[_PendingSubmission]) -> None:
    for one in group:
        one.settle(None)


def _fail(group: Iterable[_PendingSubmission], error: Exception) -> None:
    for one in group:
        one.settle(error)
