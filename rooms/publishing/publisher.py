"""Publish messages: from the bytes of a request to the bytes of its answer."""

import functools
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rooms.domain.ids import RoomId
from rooms.domain.principal import Principal
from rooms.errors import (
    ForbiddenError,
    InvalidError,
    KeyReusedError,
    NotFoundError,
    QuotaExceededError,
    QuotaTooLargeError,
    RoomsError,
    StorageRefusedError,
    SuspendedError,
)
from rooms.ports import Clock
from rooms.publishing.batch_bounds import BatchTooCostlyError
from rooms.publishing.commit_outcomes import IdReused, KeyReused, Settle
from rooms.publishing.committers import Committers
from rooms.publishing.deferred_checks import Checker, ChecksPendingError, FiltersPendingError
from rooms.publishing.outcome_metrics import PublishMetrics
from rooms.publishing.quotas import Admission, QuotaKeeper
from rooms.publishing.request import (
    MessageRequest,
    check_idempotency_key,
    decode_batch,
    decode_message,
)
from rooms.publishing.request_preparation import (
    REFUSALS,
    FindByCallerId,
    RequestPreparation,
    matching_answers,
)
from rooms.publishing.routing import PublishAccess, RoutingTable
from rooms.publishing.routing_cache import RoutingCache
from rooms.publishing.signatures import SignatureChecker

MIN_ROUNDS: Final = 3
MAX_ROUTING_S: Final = 1.0
"""A request is routed again while its room changes, so often at least, and so long at most."""
_HTTP_ACCEPTED: Final = 202
_NONE_REFUSED: Final[Mapping[int, str]] = {}
_NONE_ANSWERED: Final[Mapping[str, bytes]] = {}
_SINGLE_TAG: Final = b"one\n"
_BATCH_TAG: Final = b"batch\n"

FindByIdempotencyKey = Callable[[RoomId, str], Awaitable[tuple[bytes, bytes] | None]]


@dataclass(slots=True)
class PublishResult:
    """Answer a request with a JSON body.

    It is not frozen: creating one that is costs four times as much, and each publish does.
    """

    status: int
    body: bytes
    replayed: bool = False
    """The answer is that of an earlier request with the same key or caller ids."""
    known_messages: int = 0
    """The messages of a batch that were published before, and the bytes of their payloads."""
    known_bytes: int = 0


class Publisher:
    """Publish messages for one process. Its state is caches, except the committer's queue.

    Both methods raise MalformedError, InvalidError, NotFoundError, ForbiddenError, TooLargeError,
    and ConflictError when the Idempotency-Key or a caller id was used with other content.
    StorageRefusedError: nothing was written. StorageUnavailableError: in doubt; the same request
    with the same Idempotency-Key can be sent again safely.
    """

    def __init__(
        self,
        *,
        routing: RoutingCache,
        committers: Committers,
        preparation: RequestPreparation,
        find_by_idempotency_key: FindByIdempotencyKey,
        find_by_caller_id: FindByCallerId,
        clock: Clock,
        publish_metrics: PublishMetrics,
        max_batch: int,
        checker: Checker,
        signatures: SignatureChecker,
        quotas: QuotaKeeper | None = None,
    ) -> None:
        """`quotas`: limits of organisations and rooms; None: there are none."""
        self._quotas = quotas
        self._signatures = signatures
        self.checker = checker
        self._routing = routing
        self._committers = committers
        self._preparation = preparation
        self._find_by_idempotency_key = find_by_idempotency_key
        self._find_by_caller_id = find_by_caller_id
        self._clock = clock
        self._publish_metrics = publish_metrics
        self._max_batch = max_batch

    # These two return coroutines of `_publish`: one that only awaits another costs each publish.
    def publish(
        self, principal: Principal, room_id: RoomId, body: bytes, idempotency_key: str | None
    ) -> Coroutine[Any, Any, PublishResult]:
        """Publish the one message in `body`."""
        return self._publish(principal, room_id, body, idempotency_key, batch=False)

    def publish_batch(
        self, principal: Principal, room_id: RoomId, body: bytes, idempotency_key: str | None
    ) -> Coroutine[Any, Any, PublishResult]:
        """Publish the messages in `body`, all or none."""
        return self._publish(principal, room_id, body, idempotency_key, batch=True)

    def publish_nowait(
        self, principal: Principal, room_id: RoomId, body: bytes, settle: Settle
    ) -> bytes | None:
        """Submit the one message in `body` if that needs no wait, and return the answer to it.

        The answer holds once `settle` is called with None; see `GroupCommitter.submit_nowait`. None
        is returned for everything else, such as a refusal: nothing was submitted, and `publish`
        has the answer. Call that one as well where `settle` is called with a conflict.

        StorageRefusedError: too much waits for its commit.
        """
        table, quotas = self._routing.cached(room_id), self._quotas
        if (
            table is None
            or table.organisation_id != principal.organisation_id
            or principal.is_restricted
            or table.has_costly_checks
            or (quotas is not None and quotas.must_admit(principal.quotas, table))
        ):
            return None
        begun_s = self._clock.monotonic()
        try:
            message = decode_message(body)
            if message.signature:
                return None
            rows = self._preparation.at_once(
                table, principal, None, [message], refused=_NONE_REFUSED, answered=_NONE_ANSWERED
            )
        except FiltersPendingError:
            return None
        except ChecksPendingError:
            table.has_costly_checks = True
            return None
        except RoomsError:
            return None
        rows.started_s, rows.organisation = begun_s, principal.organisation_id
        try:
            self._committers.choose(rows).submit_nowait(rows, settle)
        except StorageRefusedError as exc:
            self.count_failure(exc)
            raise
        return rows.answer

    def count_failure(self, error: RoomsError) -> None:
        """Count a request that was submitted by `publish_nowait` and failed."""
        self._publish_metrics.count_failure(error)

    async def check(self, principal: Principal, room_id: RoomId, body: bytes) -> bytes:
        """Return how the one message in `body` would be answered now. Nothing is published.

        The ids in the answer are of no message. Quotas, signatures and earlier messages with its id
        are not looked at. The errors are those of `publish`.
        """
        table, access = await self._find_access(principal, room_id)
        message = decode_message(body)
        message.id = None  # A message that was refused would be looked up by it.
        request = table, principal, access, [message]
        try:
            rows = self._preparation.at_once(*request, refused=_NONE_REFUSED, answered={})
        except REFUSALS as exc:
            rows = await self._preparation.after_refusal(
                exc, *request, refused=_NONE_REFUSED, batch=False, answered={}
            )
        return rows.answer

    async def _find_access(
        self, principal: Principal, room_id: RoomId
    ) -> tuple[RoutingTable, PublishAccess | None]:
        """Return a room's routes, and what the principal may do there; None: everything.

        The room first: a caller without access must learn nothing from validation.
        """
        if principal.subscriptions is not None:
            # Before the room is looked up: the answer must not depend on whether there is one.
            raise ForbiddenError("this key is restricted to subscriptions; it publishes nothing")
        table = self._routing.cached(room_id)
        if table is None:
            table = await self._routing.get(room_id, principal.organisation_id)
        owns = table.organisation_id == principal.organisation_id and not principal.is_restricted
        return table, None if owns else await self._access(table, principal)

    async def _publish(
        self, principal: Principal, room_id: RoomId, body: bytes, key: str | None, *, batch: bool
    ) -> PublishResult:
        begun_s = self._clock.monotonic()
        try:
            table, access = self._routing.cached(room_id), None
            if (
                table is None
                or table.organisation_id != principal.organisation_id
                or principal.is_restricted
            ):
                table, access = await self._find_access(principal, room_id)
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
                quotas = self._quotas
                if signed or (quotas is not None and quotas.must_admit(principal.quotas, table)):
                    return await self._publish_checked(
                        table,
                        principal,
                        access,
                        messages,
                        signed=signed,
                        batch=batch,
                        begun_s=begun_s,
                        key=key,
                        request_hash=request_hash,
                    )
                return await self._commit(
                    table,
                    principal,
                    access,
                    messages,
                    refused=_NONE_REFUSED,
                    batch=batch,
                    begun_s=begun_s,
                    key=key,
                    request_hash=request_hash,
                )
            except (InvalidError, BatchTooCostlyError):
                # The room may have changed since the key was used; the first answer still holds.
                found = None if key is None else await self._find_by_idempotency_key(room_id, key)
                if found is None:
                    raise
                return self._replay(request_hash, *found)
        except RoomsError as exc:
            self._publish_metrics.count_failure(exc)
            raise

    async def _publish_checked(
        self,
        table: RoutingTable,
        principal: Principal,
        access: PublishAccess | None,
        messages: Sequence[MessageRequest],
        *,
        signed: Sequence[int],
        batch: bool,
        begun_s: float,
        key: str | None,
        request_hash: bytes,
    ) -> PublishResult:
        """Publish within the quotas, if the signatures of the messages at `signed` are right.

        A retry of what was accepted is answered beyond the quotas.
        """
        quotas, admission = self._quotas, None
        if quotas is not None and quotas.must_admit(principal.quotas, table):
            try:
                admission = await self._admit(quotas, table, principal, messages)
            except (QuotaExceededError, QuotaTooLargeError) as exc:
                known = await self._find_retry(table, principal, access, messages, key)
                if known is None:
                    quotas.count_refusal(exc)
                    raise
                if isinstance(known, tuple):
                    return self._replay(request_hash, *known)
        result = None
        try:
            result = await self._commit(
                table,
                principal,
                access,
                messages,
                refused=await self._signatures.refused(principal, table.room_id, messages, signed)
                if signed
                else _NONE_REFUSED,
                batch=batch,
                begun_s=begun_s,
                key=key,
                request_hash=request_hash,
            )
        finally:
            if quotas is not None and admission is not None:
                _give_back(quotas, admission, result)
        return result

    async def _admit(
        self,
        quotas: QuotaKeeper,
        table: RoutingTable,
        principal: Principal,
        messages: Sequence[MessageRequest],
    ) -> Admission:
        """Take from the quotas. A refusal by the room's looks once a second if they were changed.

        QuotaExceededError, QuotaTooLargeError.
        """
        await quotas.resume()
        admit = functools.partial(
            quotas.admit,
            (principal.organisation_id, principal.quotas),
            owner=table.organisation_id,
            payloads=[len(message.payload) for message in messages],
        )
        try:
            return admit((table.room_id, table.quotas))
        except (QuotaExceededError, QuotaTooLargeError):
            if table.quotas is None or not quotas.may_reload(table.room_id):
                raise
            fresh = await self._routing.reload(table.room_id, principal.organisation_id)
            if fresh.quotas == table.quotas:
                raise
            await quotas.resume()
            return admit((fresh.room_id, fresh.quotas))

    async def _find_retry(
        self,
        table: RoutingTable,
        principal: Principal,
        access: PublishAccess | None,
        messages: Sequence[MessageRequest],
        key: str | None,
    ) -> tuple[bytes, bytes] | bool | None:
        """Look up whether a request that a quota refuses was accepted before.

        Return the hash and the answer of its Idempotency-Key, or True if all of its messages were
        published under their ids; None: neither, or too many were looked up this second.
        """
        ids = [message.id for message in messages if message.id is not None]
        has_ids = len(ids) == len(messages)
        if key is None and not has_ids:
            return None
        if self._quotas is None or not self._quotas.may_look_up(principal.organisation_id):
            return None
        if key is not None:
            found = await self._find_by_idempotency_key(table.room_id, key)
            if found is not None:
                return found
        if not has_ids:
            return None
        stored = ids if access is None else [access.scope(one) for one in ids]
        known = await self._find_by_caller_id(table.room_id, stored)
        return True if all(one in known for one in stored) else None

    async def _access(self, table: RoutingTable, principal: Principal) -> PublishAccess | None:
        """Return what the principal may publish, as of now where the cached table refuses it.

        A refusal reads the room, as a request for a room that does not exist does.
        """
        try:
            return table.access(principal, self._clock.now_ms())
        except (ForbiddenError, NotFoundError, SuspendedError):
            fresh = await self._routing.reload(table.room_id, principal.organisation_id)
            return fresh.access(principal, self._clock.now_ms())

    async def _reload(
        self, table: RoutingTable, principal: Principal
    ) -> tuple[RoutingTable, PublishAccess | None]:
        fresh = await self._routing.reload(table.room_id, principal.organisation_id)
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
        preparation = self._preparation
        answered: dict[str, bytes] = {}
        rounds = 0
        while rounds < MIN_ROUNDS or self._clock.monotonic() - begun_s < MAX_ROUTING_S:
            rounds += 1
            while True:
                try:
                    rows = (
                        await preparation.in_slices(
                            table, principal, access, messages, refused=refused, answered=answered
                        )
                        if batch
                        else preparation.at_once(
                            table, principal, access, messages, refused=refused, answered=answered
                        )
                    )
                except REFUSALS as exc:
                    rows = await preparation.after_refusal(
                        exc,
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
                outcome = await self._committers.choose(rows).submit(rows)
                if not isinstance(outcome, IdReused):
                    break
                answered |= matching_answers(messages, outcome.answers, access, batch=batch)
            if outcome is None:
                known = [one for one in messages if one.id in answered] if answered else ()
                return PublishResult(
                    _HTTP_ACCEPTED,
                    rows.answer,
                    replayed=not rows.messages,
                    known_messages=len(known),
                    known_bytes=sum(len(one.payload) for one in known),
                )
            if isinstance(outcome, KeyReused):
                return self._replay(request_hash, outcome.request_hash, outcome.answer)
            table, access = await self._reload(table, principal)
        raise StorageRefusedError(
            f"room {table.room_id} changes faster than a message can be routed"
        )

    def _replay(self, request_hash: bytes, first_hash: bytes, answer: bytes) -> PublishResult:
        if request_hash != first_hash:
            raise KeyReusedError("this Idempotency-Key was used in this room with another request")
        self._publish_metrics.count_duplicate()
        return PublishResult(_HTTP_ACCEPTED, answer, replayed=True)


def _give_back(quotas: QuotaKeeper, admission: Admission, result: PublishResult | None) -> None:
    """Give back what was taken for messages that were not written."""
    if result is None or result.replayed:
        quotas.give_back(admission, admission.messages, admission.bytes)
    elif result.known_messages:
        quotas.give_back(admission, result.known_messages, result.known_bytes)
