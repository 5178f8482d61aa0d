"""The service: from the bytes of a request to the bytes of its answer."""

import functools
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rooms.domain.ids import RoomId
from rooms.domain.principal import Principal
from rooms.errors import ConflictError, InvalidError, RoomsError, StorageRefusedError
from rooms.ports import Clock
from rooms.publishing.committer import Committer, Taken
from rooms.publishing.draft import Drafter
from rooms.publishing.meter import Meter
from rooms.publishing.plan import RoomPlan
from rooms.publishing.planner import Planner
from rooms.publishing.request import MessageRequest, check_key, read_batch, read_one
from rooms.storage import arrays
from rooms.storage.publish import Submission

ROUNDS: Final = 3
"""How often a publish is planned anew because its room changed meanwhile."""
_ACCEPTED: Final = 202
_ONE: Final = b"one\n"
_BATCH: Final = b"batch\n"

FindAnswer = Callable[[RoomId, str], Awaitable[tuple[bytes, bytes] | None]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back: a JSON body. `replayed`: an earlier request with the same Idempotency-Key got it first."""

    status: int
    body: bytes
    replayed: bool = False


class Publisher:
    """Publishes for one process. Everything it holds but the committer's queue is a cache.

    Errors of both methods: MalformedError, InvalidError, NotFoundError, ConflictError (the Idempotency-Key was used with
    another body), TooLargeError; StorageRefusedError (nothing was written), StorageUnavailableError (in doubt: with the
    same Idempotency-Key the same request may be sent again safely).
    """

    def __init__(
        self,
        *,
        planner: Planner,
        committer: Committer,
        drafter: Drafter,
        find_answer: FindAnswer,
        clock: Clock,
        meter: Meter,
        max_batch: int,
    ) -> None:
        self._planner = planner
        self._committer = committer
        self._drafter = drafter
        self._find_answer = find_answer
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
                for _ in range(ROUNDS):
                    submission = await self._submission(plan, principal, messages, batch=batch)
                    submission.begun_s, submission.key, submission.request_hash = begun_s, key, request_hash
                    outcome = await self._committer.submit(submission)
                    if outcome is None:
                        return Answer(_ACCEPTED, submission.answer)
                    if isinstance(outcome, Taken):
                        return self._replayed(request_hash, outcome.request_hash, outcome.answer)
                    plan = await self._planner.fresh(room_id, principal.organisation_id)
            except InvalidError:
                # The room may have changed since the key was taken; the first answer stands all the same.
                found = None if key is None else await self._find_answer(room_id, key)
                if found is None:
                    raise
                return self._replayed(request_hash, *found)
            raise StorageRefusedError(f"room {room_id} changes faster than a publish can be planned")
        except RoomsError as exc:
            self._meter.failed(exc)
            raise

    async def _submission(
        self, plan: RoomPlan, principal: Principal, messages: Sequence[MessageRequest], *, batch: bool
    ) -> Submission:
        publisher, now_ms = self._packed(principal.key_id), self._clock.now_ms()
        try:
            return self._drafter.draft(plan, messages, batch=batch, publisher=publisher, now_ms=now_ms)
        except InvalidError:
            # What an old plan does not know may be there by now.
            fresh = await self._planner.fresh(plan.room_id, principal.organisation_id)
            if fresh is plan:
                raise
        return self._drafter.draft(fresh, messages, batch=batch, publisher=publisher, now_ms=now_ms)

    def _replayed(self, request_hash: bytes, first_hash: bytes, answer: bytes) -> Answer:
        if request_hash != first_hash:
            raise ConflictError("this Idempotency-Key was used in this room with another request")
        self._meter.duplicate()
        return Answer(_ACCEPTED, answer, replayed=True)
