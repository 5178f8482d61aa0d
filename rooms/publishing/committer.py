"""Group commit: requests that arrive while a commit is under way share the next one."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from rooms.domain.ids import RoomId
from rooms.errors import StorageRefusedError, StorageUnavailableError
from rooms.storage.publish import Verdict
from rooms.storage.submission import Submission

_log = logging.getLogger(__name__)

LINGER_S: Final = 0.003
"""How long a commit waits for company, when company is likely: at most, as it ends when those are here who came last time. A
commit alone costs what twenty messages in it do.
"""
MAX_ROWS: Final = 2_000
MAX_BYTES: Final = 4 * 1024 * 1024
MAX_WAITING_BYTES: Final = 256 * 1024 * 1024
"""Beyond this, requests are refused instead of gathered: PostgreSQL is not keeping up."""
_OVERHEAD_BYTES: Final = 1024
_MOST_ROUNDS: Final = 8
_MOST_REFUSALS: Final = 3
_SMOOTHING: Final = 0.2

Write = Callable[[Sequence[Submission]], Awaitable[Verdict]]


class Stale:
    """The plan is no longer the room's: plan again."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The idempotency key is another request's, which had this hash and this answer."""

    request_hash: bytes
    answer: bytes


@dataclass(frozen=True, slots=True)
class Named:
    """Ids of the publisher's own that messages have already: the hash of each one's content, and its answer."""

    answers: Mapping[str, tuple[bytes, bytes]]


Outcome = Stale | Taken | Named | None
"""None: committed."""
STALE: Final = Stale()


class _Waiting:
    __slots__ = ("future", "size", "submission")

    def __init__(self, submission: Submission, future: "asyncio.Future[Outcome]") -> None:
        self.submission = submission
        self.future = future
        self.size = submission.size + _OVERHEAD_BYTES * submission.rows


class Committer:
    """One commit at a time, through `write`. `async with Committer(write) as committer`; leaving it drains.

    `committed` is told of every group right after its commit.
    """

    def __init__(self, write: Write, *, committed: Callable[[Sequence[Submission]], None]) -> None:
        self._write = write
        self._committed = committed
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._arrived = asyncio.Event()
        self._enough = asyncio.Event()
        self._wanted = 0
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._last_arrival = 0.0
        self._gap_s = 1.0
        self._last_group = 0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._commit_for_ever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit what was handed over, take nothing more."""
        self._closing = True
        self._arrived.set()
        self._enough.set()
        if self._task is not None:
            await self._task
            self._task = None

    async def submit(self, submission: Submission) -> Outcome:
        """Have it committed. Once this has begun, cancelling it changes nothing but that nobody waits for the outcome.

        StorageUnavailableError: in doubt. StorageRefusedError: not written, and the same may succeed later.
        """
        if self._closing or self._task is None:
            raise StorageRefusedError("publishing is shutting down")
        if self._waiting_bytes > MAX_WAITING_BYTES:
            raise StorageRefusedError("too many publishes are waiting to be written")
        waiting = _Waiting(submission, self._loop.create_future())
        now = self._loop.time()
        self._gap_s += _SMOOTHING * (min(now - self._last_arrival, 1.0) - self._gap_s)
        self._last_arrival = now
        self._waiting.append(waiting)
        self._waiting_bytes += waiting.size
        self._arrived.set()
        if self._wanted and len(self._waiting) >= self._wanted:
            self._enough.set()
        return await waiting.future

    async def _commit_for_ever(self) -> None:
        while True:
            if not self._waiting:
                if self._closing:
                    return
                self._arrived.clear()
                await self._arrived.wait()
            await self._linger()
            if group := self._take():
                await self._settle(group)
                self._last_group = len(group) + len(self._waiting)

    async def _linger(self) -> None:
        # A lone publisher waits for its own answer before it comes again: no company was there last time, and none
        # will come. Otherwise as many are expected as last time, and the wait ends when they are here.
        if self._last_group <= 1 or self._gap_s > LINGER_S / 2 or len(self._waiting) >= self._last_group:
            return
        if self._closing:
            return
        self._enough.clear()
        self._wanted = self._last_group
        timer = self._loop.call_later(LINGER_S, self._enough.set)
        await self._enough.wait()
        timer.cancel()
        self._wanted = 0

    def _take(self) -> list[_Waiting]:
        """The next group, in order of arrival. A claim comes once a group: its second request must see the first's."""
        group: list[_Waiting] = []
        later: list[_Waiting] = []
        claimed: set[tuple[RoomId, str, str | None]] = set()
        rows = size = 0
        waiting = self._waiting
        while waiting:
            one = waiting[0]
            submission = one.submission
            if group and (rows + submission.rows > MAX_ROWS or size + one.size > MAX_BYTES):
                break
            waiting.popleft()
            if submission.key is not None or submission.names:
                claims = submission.claims()
                if not claimed.isdisjoint(claims):
                    later.append(one)
                    continue
                claimed.update(claims)
            group.append(one)
            rows += submission.rows
            size += one.size
        waiting.extendleft(reversed(later))
        self._waiting_bytes -= sum(one.size for one in group)
        return group

    async def _settle(self, group: list[_Waiting]) -> None:
        """Commit a group; what fails as a group is tried one by one, so that a bad request fails alone."""
        error = await self._attempt(group)
        if error is None:
            return
        if len(group) == 1 or isinstance(error, StorageUnavailableError):
            _fail(group, error)
            return
        if not isinstance(error, StorageRefusedError):  # what PostgreSQL refuses is logged where requests are answered
            _log.warning("a group of %s publishes failed and is tried one by one: %s", len(group), error)
        refusals = 0
        rest = deque(one for one in group if not one.future.done())
        while rest:
            one = rest.popleft()
            error = await self._attempt([one])
            if error is None:
                refusals = 0
                continue
            _fail([one], error)
            refusals += isinstance(error, StorageRefusedError)
            # Then it is PostgreSQL that takes nothing, not a request that is bad; the others must not wait for it too.
            if refusals == _MOST_REFUSALS or isinstance(error, StorageUnavailableError):
                _fail(rest, error)
                return

    async def _attempt(self, group: list[_Waiting]) -> Exception | None:
        """What went wrong, with the futures of those it went wrong for still open."""
        try:
            await self._commit(group)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it belongs to those who wait
            return exc
        return None

    async def _commit(self, group: list[_Waiting]) -> None:
        for _ in range(_MOST_ROUNDS):
            submissions = [one.submission for one in group]
            verdict = await self._write(submissions)
            if not verdict.stands_in_the_way:
                self._committed(submissions)
                for one in group:
                    _tell(one, None)
                return
            group = [one for one in group if not _answered(one, verdict)]
            if not group:
                return
        raise StorageRefusedError("other writers keep taking the same idempotency keys, or ids")


def _answered(one: _Waiting, verdict: Verdict) -> bool:
    submission = one.submission
    if submission.key is not None and (taken := verdict.taken.get((submission.room_id, submission.key))):
        _tell(one, Taken(*taken))
        return True
    if submission.names and verdict.named:
        names = [name.caller_id for name in submission.names]
        answers = {
            name: found for name in names if (found := verdict.named.get((submission.room_id, name))) is not None
        }
        if answers:
            _tell(one, Named(answers))
            return True
    if (submission.room_id, submission.plan_version) in verdict.stale:
        _tell(one, STALE)
        return True
    return False


def _tell(one: _Waiting, outcome: Outcome) -> None:
    if not one.future.done():
        one.future.set_result(outcome)


def _fail(group: Iterable[_Waiting], error: Exception) -> None:
    for one in group:
        if not one.future.done():
            one.future.set_exception(error)
