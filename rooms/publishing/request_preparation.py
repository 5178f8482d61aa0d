"""Prepare requests for their commit, where that takes more than the pure `Preparer`.

The rows of a large batch are prepared in slices, so that other requests go on. Organisations take
turns with them, and the event loop runs one slice a round. What is refused is tried again with
fresh routes, and with the answers of messages that are stored already. Costly checks run in the
sandbox.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from typing import Final

from rooms.db import pg_arrays
from rooms.db.publish.request_rows import InsertRows
from rooms.domain.ids import RoomId
from rooms.domain.principal import Principal
from rooms.errors import ConflictError, ForbiddenError, InvalidError, RoomsError
from rooms.fair_slots import FairSlots
from rooms.ports import Clock
from rooms.publishing.batch_bounds import BatchTooCostlyError
from rooms.publishing.deferred_checks import ChecksPendingError, DeferredChecks
from rooms.publishing.prepare import Preparer, content_hash
from rooms.publishing.request import MessageRequest
from rooms.publishing.routing import PublishAccess, RoutingTable
from rooms.publishing.routing_cache import RoutingCache
from rooms.publishing.sandbox.client import CheckSandbox

KnownAnswers = Mapping[str, tuple[bytes, bytes]]
"""Content hash and answer by caller id."""
FindByCallerId = Callable[[RoomId, Collection[str]], Awaitable[KnownAnswers]]
REFUSALS: Final = (ChecksPendingError, InvalidError, BatchTooCostlyError, ForbiddenError)
"""Errors of `at_once` and `in_slices` after which `after_refusal` may still succeed."""


class RequestPreparation:
    """Prepare the requests of one process. The errors are those of `Preparer`."""

    def __init__(
        self,
        preparer: Preparer,
        *,
        routing: RoutingCache,
        find_by_caller_id: FindByCallerId,
        sandbox: CheckSandbox,
        clock: Clock,
    ) -> None:
        self._preparer = preparer
        self._routing = routing
        self._find_by_caller_id = find_by_caller_id
        self._sandbox = sandbox
        self._clock = clock
        # Those that wait hold the bytes of their requests, which the API bounds.
        self._slice_turns = FairSlots(1, max_per_tenant=1)
        self._pack_key_id = functools.lru_cache(maxsize=1000)(pg_arrays.uuid_from_text)

    def at_once(
        self,
        table: RoutingTable,
        principal: Principal,
        access: PublishAccess | None,
        messages: Sequence[MessageRequest],
        *,
        refused: Mapping[int, str],
        answered: Mapping[str, bytes],
    ) -> InsertRows:
        """Return the rows of a request with one message."""
        (message,) = messages
        return self._preparer.prepare_one(
            table,
            message,
            publisher=self._pack_key_id(principal.key_id),
            now_ms=self._clock.now_ms(),
            access=access,
            application=principal.application,
            answered=answered,
            refused=refused,
        )

    async def in_slices(
        self,
        table: RoutingTable,
        principal: Principal,
        access: PublishAccess | None,
        messages: Sequence[MessageRequest],
        *,
        refused: Mapping[int, str],
        answered: Mapping[str, bytes],
    ) -> InsertRows:
        """Return the rows of a batch, and let other requests go on meanwhile."""
        return await self._run_slices(
            principal,
            self._preparer.prepare_in_slices(
                table,
                messages,
                batch=True,
                publisher=self._pack_key_id(principal.key_id),
                now_ms=self._clock.now_ms(),
                access=access,
                application=principal.application,
                answered=answered,
                refused=refused,
            ),
        )

    async def after_refusal(
        self,
        error: Exception,
        table: RoutingTable,
        principal: Principal,
        access: PublishAccess | None,
        messages: Sequence[MessageRequest],
        *,
        refused: Mapping[int, str],
        batch: bool,
        answered: dict[str, bytes],
    ) -> InsertRows:
        """Return the rows of a request whose first attempt ended with `error`.

        Adds to `answered` messages that are stored already, but would be refused today.
        """
        prepare = functools.partial(
            self._preparer.prepare_in_slices,
            messages=messages,
            batch=batch,
            publisher=self._pack_key_id(principal.key_id),
            application=principal.application,
            now_ms=self._clock.now_ms(),
            answered=answered,
            refused=refused,
        )
        try:
            if not isinstance(error, ChecksPendingError):
                raise error
            return await self._with_checks(
                principal, functools.partial(prepare, table, access=access), error.checks
            )
        except (InvalidError, BatchTooCostlyError, ForbiddenError) as exc:
            # The cached routing table may be out of date.
            refusal: RoomsError = exc
            fresh = await self._routing.reload(table.room_id, principal.organisation_id)
            access = fresh.access(principal, self._clock.now_ms())
            if fresh is not table:
                try:
                    return await self._with_checks(
                        principal, functools.partial(prepare, fresh, access=access)
                    )
                except (InvalidError, BatchTooCostlyError) as again:
                    refusal = again
            if isinstance(refusal, ForbiddenError):
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
                raise refusal from None
            answered |= matching_answers(messages, found, access, batch=batch)
        return await self._with_checks(principal, functools.partial(prepare, fresh, access=access))

    async def _with_checks(
        self,
        principal: Principal,
        prepare: Callable[..., Generator[None, None, InsertRows]],
        checks: DeferredChecks | None = None,
    ) -> InsertRows:
        """Return the rows, with costly checks done in the sandbox."""
        checks = checks or DeferredChecks()
        while True:
            if checks.pending:
                await checks.run(self._sandbox, principal.organisation_id)
            try:
                return await self._run_slices(principal, prepare(checks=checks))
            except ChecksPendingError as exc:
                checks = exc.checks

    async def _run_slices(
        self, principal: Principal, slices: Generator[None, None, InsertRows]
    ) -> InsertRows:
        """Return the rows of a request, and let others go on after each of its slices."""
        while True:
            async with self._slice_turns.slot(principal.organisation_id):
                try:
                    next(slices)
                except StopIteration as done:
                    rows: InsertRows = done.value
                    return rows
                # The turn lasts until the loop comes round, or all would run a slice each time.
                await asyncio.sleep(0)


def matching_answers(
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
