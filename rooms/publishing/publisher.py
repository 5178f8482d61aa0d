"""The service: from the bytes of a request to the bytes of its answer."""

import functools
import hashlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rooms.domain.ids import RoomId
from rooms.domain.principal import Principal
from rooms.errors import ConflictError, InvalidError, RoomsError, StorageRefusedError
from rooms.ports import Clock
from rooms.publishing.checks import Checker, ChecksPendingError, RequestChecks
from rooms.publishing.committer import Committer, Named, Taken
from rooms.publishing.draft import Drafter, content_hash
from rooms.publishing.meter import Meter
from rooms.publishing.plan import RoomPlan
from rooms.publishing.planner import Planner
from rooms.publishing.request import MessageRequest, check_key, read_batch, read_one
from rooms.publishing.sandbox import Sandbox
from rooms.storage import arrays
from rooms.storage.submission import Submission

ROUNDS: Final = 3
"""How often a publish is planned anew because its room changed meanwhile."""
_ACCEPTED: Final = 202
_ONE: Final = b"one\n"
_BATCH: Final = b"batch\n"

Answers = Mapping[str, tuple[bytes, bytes]]
"""By an id of a publisher's own: the hash of the content that has it, and its answer."""
FindNamed = Callable[[RoomId, Collection[str]], Awaitable[Answers]]
FindAnswer = Callable[[RoomId, str], Awaitable[tuple[bytes, bytes] | None]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back: a JSON body. `replayed`: an earlier request got it first, with the same Idempotency-Key or with the same
    ids of its publisher's own, and nothing was published now.
    """

    status: int
    body: bytes
    replayed: bool = False


class Publisher:
    """Publishes for one process. Everything it holds but the committer's queue is a cache.

    Errors of both methods: MalformedError, InvalidError, NotFoundError, ConflictError (the Idempotency-Key, or an id of
    the publisher's own, was used with other content), TooLargeError; StorageRefusedError (nothing was written),
    StorageUnavailableError (in doubt: with the same Idempotency-Key the same request may be sent again safely).
    """

    def __init__(
        self,
        *,
        planner: Planner,
        committer: Committer,
        drafter: Drafter,
        find_answer: FindAnswer,
        find_named: FindNamed,
        clock: Clock,
        meter: Meter,
        max_batch: int,
        sandbox: Sandbox,
        checker: Checker,
    ) -> None:
        self.checker = checker
        self._sandbox = sandbox
        self._planner = planner
        self._committer = committer
        self._drafter = drafter
        self._find_answer = find_answer
        self._find_named = find_named
        self._clock = clock
        self._meter = meter
        self._max_batch = max_batch
        self._packed = functools.lru_cache(maxsize=1000)(arrays.uuid_of)

    async def publish(self, principal: Principal, room_id: RoomId, body: bytes, idempotency_key: str | None) -> Answer:
        """Publish the one message in `body`."""
        return await self._publish(principal, room_id, body, idempotency_key, batch=False)

    async def publish_batch(
        self, principal: Principal, room_id: RoomId, body: bytes, idempotency_key: str | None
    ) -> Answer:
        """Publish the messages in `body`, all or none."""
        return await self._publish(principal, room_id, body, idempotency_key, batch=True)

    async def _publish(
        self, principal: Principal, room_id: RoomId, body: bytes, key: str | None, *, batch: bool
    ) -> Answer:
        begun_s = self._clock.monotonic()
        try:
            # The room first: whose it is not learns nothing from how its request is found wrong.
            plan = self._planner.known(room_id, principal.organisation_id)
            if plan is None:
                plan = await self._planner.plan(room_id, principal.organisation_id)
            request_hash = b""
            if key is not None:
                check_key(key)
                request_hash = hashlib.sha256((_BATCH if batch else _ONE) + body).digest()
            try:
                messages = read_batch(body, self._max_batch) if batch else [read_one(body)]
                return await self._written(
                    plan, principal, messages, batch=batch, begun_s=begun_s, key=key, request_hash=request_hash
                )
            except InvalidError:
                # The room may have changed since the key was taken; the first answer stands all the same.
                found = None if key is None else await self._find_answer(room_id, key)
                if found is None:
                    raise
                return self._replayed(request_hash, *found)
        except RoomsError as exc:
            self._meter.failed(exc)
            raise

    async def _written(
        self,
        plan: RoomPlan,
        principal: Principal,
        messages: Sequence[MessageRequest],
        *,
        batch: bool,
        begun_s: float,
        key: str | None,
        request_hash: bytes,
    ) -> Answer:
        known: dict[str, bytes] = {}
        for _ in range(ROUNDS):
            while True:
                submission = await self._submission(plan, principal, messages, batch=batch, known=known)
                if not submission.messages and key is None:
                    self._meter.duplicate()
                    return Answer(_ACCEPTED, submission.answer, replayed=True)
                submission.begun_s, submission.key, submission.request_hash = begun_s, key, request_hash
                outcome = await self._committer.submit(submission)
                if not isinstance(outcome, Named):
                    break
                known |= _same(messages, outcome.answers, batch=batch)
            if outcome is None:
                return Answer(_ACCEPTED, submission.answer, replayed=not submission.messages)
            if isinstance(outcome, Taken):
                return self._replayed(request_hash, outcome.request_hash, outcome.answer)
            plan = await self._planner.fresh(plan.room_id, principal.organisation_id)
        raise StorageRefusedError(f"room {plan.room_id} changes faster than a publish can be planned")

    async def _submission(
        self,
        plan: RoomPlan,
        principal: Principal,
        messages: Sequence[MessageRequest],
        *,
        batch: bool,
        known: dict[str, bytes],
    ) -> Submission:
        """What to write; `known` grows by messages that the room has and would not take any more."""
        publisher, now_ms = self._packed(principal.key_id), self._clock.now_ms()
        draft = functools.partial(
            self._drafter.draft, messages=messages, batch=batch, publisher=publisher, now_ms=now_ms, known=known
        )
        try:
            try:
                return draft(plan)
            except ChecksPendingError as exc:
                return await self._checked(principal, functools.partial(draft, plan), exc.checks)
        except InvalidError:
            # What an old plan does not know may be there by now.
            fresh = await self._planner.fresh(plan.room_id, principal.organisation_id)
            if fresh is not plan:
                return await self._checked(principal, functools.partial(draft, fresh))
            # The room may have changed since a message got its id; the first answer stands all the same.
            ids = [message.id for message in messages if message.id is not None and message.id not in known]
            found = await self._find_named(plan.room_id, ids) if ids else {}
            if not found:
                raise
            known |= _same(messages, found, batch=batch)
        return await self._checked(principal, functools.partial(draft, plan))

    async def _checked(
        self, principal: Principal, draft: Callable[..., Submission], checks: RequestChecks | None = None
    ) -> Submission:
        """A draft whose costly checks are done in the sandbox, and never on the event loop."""
        checks = checks or RequestChecks()
        while True:
            if checks.pending:
                await checks.run(self._sandbox, principal.organisation_id)
            try:
                return draft(checks=checks)
            except ChecksPendingError as exc:
                checks = exc.checks

    def _replayed(self, request_hash: bytes, first_hash: bytes, answer: bytes) -> Answer:
        if request_hash != first_hash:
            raise ConflictError("this Idempotency-Key was used in this room with another request")
        self._meter.duplicate()
        return Answer(_ACCEPTED, answer, replayed=True)


def _same(messages: Sequence[MessageRequest], found: Answers, *, batch: bool) -> dict[str, bytes]:
    """The answers of those messages that were published before. ConflictError where one had other content."""
    answers = {}
    for index, message in enumerate(messages):
        if message.id is None or message.id not in found:
            continue
        first_hash, answer = found[message.id]
        if first_hash != content_hash(message):
            place = f"messages[{index}]: " if batch else ""
            raise ConflictError(f"{place}the id {message.id!r} was published in this room with other content")
        answers[message.id] = answer
    return answers
