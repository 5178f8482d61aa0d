"""Publish messages: from the bytes of a request to the bytes of its answer."""

import functools
import hashlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rooms.db import pg_arrays
from rooms.db.publish.request_rows import InsertRows
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.principal import Principal
from rooms.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    PermanentError,
    RoomsError,
    StorageRefusedError,
    SuspendedError,
)
from rooms.metrics import Metrics, observe_many
from rooms.ports import Clock
from rooms.publishing.deferred_checks import Checker, ChecksPendingError, DeferredChecks
from rooms.publishing.group_commit import LARGE_ROWS, GroupCommitter, IdReused, KeyReused
from rooms.publishing.prepare import Preparer, content_hash
from rooms.publishing.request import (
    MessageRequest,
    check_idempotency_key,
    decode_batch,
    decode_message,
)
from rooms.publishing.routing import PublishAccess, RoutingCache, RoutingTable
from rooms.publishing.sandbox.client import CheckSandbox
from rooms.publishing.signatures import SignatureChecker

_log = logging.getLogger(__name__)

ACCEPTED: Final = "accepted"
DUPLICATE: Final = "duplicate"
_MAX_LOGGED: Final = 1000
"""Subscriptions whose failing filter was logged, before all are forgotten."""
MIN_ROUNDS: Final = 3
MAX_ROUTING_S: Final = 1.0
"""A request is routed again while its room changes, so often at least, and so long at most."""
_HTTP_ACCEPTED: Final = 202
_NONE_REFUSED: Final[Mapping[int, str]] = {}
_SINGLE_TAG: Final = b"one\n"
_BATCH_TAG: Final = b"batch\n"

KnownAnswers = Mapping[str, tuple[bytes, bytes]]
"""Content hash and answer by caller id."""
FindByCallerId = Callable[[RoomId, Collection[str]], Awaitable[KnownAnswers]]
FindByIdempotencyKey = Callable[[RoomId, str], Awaitable[tuple[bytes, bytes] | None]]


@dataclass(frozen=True, slots=True)
class PublishResult:
    """Answer a request with a JSON body."""

    status: int
    body: bytes
    replayed: bool = False
    """The answer is that of an earlier request with the same key or caller ids."""


class Publisher:
    """Publish messages for one process. Its state is caches, except the committer's queue.

    Both methods raise MalformedError, InvalidError, NotFoundError, TooLargeError, and ConflictError
    when the Idempotency-Key or a caller id was used with other content. StorageRefusedError:
    nothing was written. StorageUnavailableError: in doubt; the same request with the same
    Idempotency-Key can be sent again safely.
    """

    def __init__(
        self,
        *,
        routing: RoutingCache,
        committer: GroupCommitter,
        large_committer: GroupCommitter,
        preparer: Preparer,
        find_by_idempotency_key: FindByIdempotencyKey,
        find_by_caller_id: FindByCallerId,
        clock: Clock,
        publish_metrics: "PublishMetrics",
        max_batch: int,
        sandbox: CheckSandbox,
        checker: Checker,
        signatures: SignatureChecker,
    ) -> None:
        self._signatures = signatures
        self.checker = checker
        self._sandbox = sandbox
        self._routing = routing
        self._committer = committer
        self._large_committer = large_committer
        self._preparer = preparer
        self._find_by_idempotency_key = find_by_idempotency_key
        self._find_by_caller_id = find_by_caller_id
        self._clock = clock
        self._publish_metrics = publish_metrics
        self._max_batch = max_batch
        self._pack_key_id = functools.lru_cache(maxsize=1000)(pg_arrays.uuid_from_text)

    async def publish(
        self, principal: Principal, room_id: RoomId, body: bytes, idempotency_key: str | None
    ) -> PublishResult:
        """Publish the one message in `body`."""
        return await self._publish(principal, room_id, body, idempotency_key, batch=False)

    async def publish_batch(
        self, principal: Principal, room_id: RoomId, body: bytes, idempotency_key: str | None
    ) -> PublishResult:
        """Publish the messages in `body`, all or none."""
        return await self._publish(principal, room_id, body, idempotency_key, batch=True)

    async def _publish(
        self, principal: Principal, room_id: RoomId, body: bytes, key: str | None, *, batch: bool
    ) -> PublishResult:
        begun_s = self._clock.monotonic()
        try:
            if principal.subscriptions is not None:
                # Before the room is looked up: the answer must not depend on whether there is one.
                raise ForbiddenError(
                    "this key is restricted to subscriptions; it publishes nothing"
                )
            # The room first: a caller without access must learn nothing from validation.
            table = self._routing.cached(room_id)
            if table is None:
                table = await self._routing.get(room_id)
            access = (
                None
                if table.organisation_id == principal.organisation_id
                and not principal.is_restricted
                else await self._access(table, principal)
            )
            request_hash = b""
            if key is not None:
                check_idempotency_key(key)
                if access is not None:
                    key = access.scope(key)
                request_hash = hashlib.sha256(
                    (_BATCH_TAG if batch else _SINGLE_TAG) + body
                ).digest()
            try:
                messages = decode_batch(body, self._max_batch) if batch else [decode_message(body)]
                signed = [index for index, one in enumerate(messages) if one.signature]
                return await self._commit(
                    table,
                    principal,
                    access,
                    messages,
                    refused=await self._signatures.refused(principal, room_id, messages, signed)
                    if signed
                    else _NONE_REFUSED,
                    batch=batch,
                    begun_s=begun_s,
                    key=key,
                    request_hash=request_hash,
                )
            except InvalidError:
                # The room may have changed since the key was used; the first answer still holds.
                found = None if key is None else await self._find_by_idempotency_key(room_id, key)
                if found is None:
                    raise
                return self._replay(request_hash, *found)
        except RoomsError as exc:
            self._publish_metrics.count_failure(exc)
            raise

    async def _access(self, table: RoutingTable, principal: Principal) -> PublishAccess | None:
        """Return what the principal may publish, as of now where the cached table refuses it.

        A refusal reads the room, as a request for a room that does not exist does.
        """
        try:
            return table.access(principal, self._clock.now_ms())
        except (NotFoundError, SuspendedError):
            fresh = await self._routing.reload(table.room_id)
            return fresh.access(principal, self._clock.now_ms())

    async def _reload(
        self, table: RoutingTable, principal: Principal
    ) -> tuple[RoutingTable, PublishAccess | None]:
        fresh = await self._routing.reload(table.room_id)
        return fresh, fresh.access(principal, self._clock.now_ms())

    async def _commit(
        self,
        table: RoutingTable,
        principal: Principal,
        access: PublishAccess | None,
        messages: Sequence[MessageRequest],
        *,
        refused: Mapping[int, str],
        batch: bool,
        begun_s: float,
        key: str | None,
        request_hash: bytes,
    ) -> PublishResult:
        answered: dict[str, bytes] = {}
        rounds = 0
        while rounds < MIN_ROUNDS or self._clock.monotonic() - begun_s < MAX_ROUTING_S:
            rounds += 1
            while True:
                rows = await self._prepare(
                    table,
                    principal,
                    access,
                    messages,
                    refused=refused,
                    batch=batch,
                    answered=answered,
                )
                if not rows.messages and key is None:
                    self._publish_metrics.count_duplicate()
                    return PublishResult(_HTTP_ACCEPTED, rows.answer, replayed=True)
                rows.started_s, rows.key, rows.request_hash = (
                    begun_s,
                    key,
                    request_hash,
                )
                rows.organisation = principal.organisation_id
                is_large = rows.row_count > LARGE_ROWS
                committer = self._large_committer if is_large else self._committer
                outcome = await committer.submit(rows)
                if not isinstance(outcome, IdReused):
                    break
                answered |= _matching_answers(messages, outcome.answers, access, batch=batch)
            if outcome is None:
                return PublishResult(_HTTP_ACCEPTED, rows.answer, replayed=not rows.messages)
            if isinstance(outcome, KeyReused):
                return self._replay(request_hash, outcome.request_hash, outcome.answer)
            table, access = await self._reload(table, principal)
        raise StorageRefusedError(
            f"room {table.room_id} changes faster than a message can be routed"
        )

    async def _prepare(
        self,
        table: RoutingTable,
        principal: Principal,
        access: PublishAccess | None,
        messages: Sequence[MessageRequest],
        *,
        refused: Mapping[int, str],
        batch: bool,
        answered: dict[str, bytes],
    ) -> InsertRows:
        """Return the rows to write.

        Adds to `answered` messages that are stored already, but would be refused today.
        """
        publisher, now_ms = self._pack_key_id(principal.key_id), self._clock.now_ms()
        prepare = functools.partial(
            self._preparer.prepare,
            messages=messages,
            batch=batch,
            publisher=publisher,
            application=principal.application,
            now_ms=now_ms,
            answered=answered,
            refused=refused,
        )
        try:
            try:
                return prepare(table, access=access)
            except ChecksPendingError as exc:
                return await self._prepare_checked(
                    principal, functools.partial(prepare, table, access=access), exc.checks
                )
        except (InvalidError, ForbiddenError) as exc:
            # The cached routing table may be out of date.
            fresh, access = await self._reload(table, principal)
            if fresh is not table:
                return await self._prepare_checked(
                    principal, functools.partial(prepare, fresh, access=access)
                )
            if isinstance(exc, ForbiddenError):
                raise
            # The room may have changed since a message was stored; the first answer still holds.
            ids = [
                message.id
                for message in messages
                if message.id is not None and message.id not in answered
            ]
            if access is not None:
                ids = [access.scope(one) for one in ids]
            found = await self._find_by_caller_id(table.room_id, ids) if ids else {}
            if not found:
                raise
            answered |= _matching_answers(messages, found, access, batch=batch)
        return await self._prepare_checked(
            principal, functools.partial(prepare, table, access=access)
        )

    async def _prepare_checked(
        self,
        principal: Principal,
        prepare: Callable[..., InsertRows],
        checks: DeferredChecks | None = None,
    ) -> InsertRows:
        """Return the rows, with costly checks done in the sandbox."""
        checks = checks or DeferredChecks()
        while True:
            if checks.pending:
                await checks.run(self._sandbox, principal.organisation_id)
            try:
                return prepare(checks=checks)
            except ChecksPendingError as exc:
                checks = exc.checks

    def _replay(self, request_hash: bytes, first_hash: bytes, answer: bytes) -> PublishResult:
        if request_hash != first_hash:
            raise ConflictError("this Idempotency-Key was used in this room with another request")
        self._publish_metrics.count_duplicate()
        return PublishResult(_HTTP_ACCEPTED, answer, replayed=True)


class PublishMetrics:
    """Count published messages by outcome, and observe the latency of accepted ones."""

    def __init__(self, metrics: Metrics) -> None:
        self._outcomes = {
            name: metrics.publishes.labels(name)
            for name in (ACCEPTED, DUPLICATE, "invalid", "refused", "unavailable")
        }
        self._filter_errors = metrics.filter_errors
        self._logged_subscriptions: set[SubscriptionId] = set()
        self._latency = metrics.publish_latency

    def count_accepted(self, messages: int, latencies_s: Iterable[float]) -> None:
        """Count the messages of a commit, with the latency of each request in it."""
        self._outcomes[ACCEPTED].inc(messages)
        observe_many(self._latency, latencies_s)

    def count_duplicate(self) -> None:
        """Count a request that was answered from its key."""
        self._outcomes[DUPLICATE].inc()

    def record_filter_error(self, subscription: SubscriptionId, error: str) -> None:
        """Count a filter that failed, and log the first failure of each subscription."""
        self._filter_errors.inc()
        if subscription not in self._logged_subscriptions:
            if len(self._logged_subscriptions) >= _MAX_LOGGED:
                self._logged_subscriptions.clear()
            self._logged_subscriptions.add(subscription)
            _log.warning(
                "filter of subscription %s failed, the message is delivered: %s",
                subscription,
                error,
            )

    def count_failure(self, error: RoomsError) -> None:
        """Count a request that was not accepted."""
        match error:
            case PermanentError():
                self._outcomes["invalid"].inc()
            case StorageRefusedError():
                self._outcomes["refused"].inc()
            case _:
                self._outcomes["unavailable"].inc()


def _matching_answers(
    messages: Sequence[MessageRequest],
    found: KnownAnswers,
    access: PublishAccess | None,
    *,
    batch: bool,
) -> dict[str, bytes]:
    """Return the answers of messages that were published before.

    ConflictError: one of them had other content.
    """
    answers = {}
    for index, message in enumerate(messages):
        if message.id is None:
            continue
        stored = message.id if access is None else access.scope(message.id)
        if stored not in found:
            continue
        first_hash, answer = found[stored]
        if first_hash != content_hash(message):
            place = f"messages[{index}]: " if batch else ""
            raise ConflictError(
                f"{place}the id {message.id!r} was published in this room with other content"
            )
        answers[message.id] = answer
    return answers
