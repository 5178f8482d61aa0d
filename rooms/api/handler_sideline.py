"""Serve `/v1/queues/{queue}/sideline`: list failed messages and purge them."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, get, post
from litestar.params import QueryParameter
from msgspec import UNSET, Struct, UnsetType

from rooms.api.auth import Caller, ServicesDep, require_scopes
from rooms.api.changes import ChangeDep, payload_read
from rooms.api.deps import ApiServices
from rooms.api.handler_queues import QueuePath
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import WithPayload
from rooms.db.bounded_lists import read_bounded
from rooms.db.catalog import handler_queues as records
from rooms.db.connection import transaction
from rooms.db.journal import append
from rooms.domain.magazine import MAX_BATCH, Slot, StoredEntry, sideline_name
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import FieldProblem, InvalidError, MagazineMissingError, MagazineUnavailableError
from rooms.ports import Magazine

_LIST: Final = "queue sideline"
_TAGS: Final = ["queues"]
_READ: Final = require_scopes(Scope.MANAGE, Scope.OPERATE)
_WRITE: Final = require_scopes(Scope.OPERATE)
MAX_PURGED: Final = 10_000
"""The most messages that one call purges."""


class FailedMessageResponse(Struct, kw_only=True):
    """Describe a message that a handler failed at.

    `taken_at`: when a shovel or sweeper took it; null: it waits. `payload` is absent for a key
    that has only the scope `view`.
    """

    id: str
    reason: str | None
    error: str | None
    shovel_count: int
    sidelined_at: datetime
    taken_at: datetime | None
    expires_at: datetime | None
    payload: msgspec.Raw | UnsetType = UNSET


class FailedMessagePage(Struct, kw_only=True):
    """List messages of a sideline by shard, in a shard by the time they were sidelined."""

    items: list[FailedMessageResponse]
    next_cursor: str | None


class PurgeResponse(Struct, kw_only=True):
    """Describe how many are gone. `more`: some may be left; call again."""

    purged: int
    more: bool


@get(
    "/queues/{queue:str}/sideline",
    opt=_READ,
    tags=_TAGS,
    summary="List a handler queue's sideline",
)
async def read_queue_sideline(
    *,
    request: Request[Any, Principal, Any],
    services: ServicesDep,
    principal: Caller,
    queue: QueuePath,
    payload: WithPayload = True,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> FailedMessagePage:
    """List what handlers failed at, and why.

    Messages that come or go meanwhile may be on a later page or not. A page ends early where its
    payloads have 1 MiB. What a person reads in the console is in the journal.
    """
    shown = payload and principal.reads_payloads
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    after = _parse_position(page.after)
    magazine = await _find_sideline(services, principal, queue)

    async def read(last: StoredEntry | None, count: int) -> Sequence[StoredEntry]:
        async with services.magazine_turns.slot(principal.organisation_id):
            entries = await magazine.peek(count, after=after if last is None else last.slot)
        return entries if shown else [_without_body(one) for one in entries]

    try:
        found, is_cut = await read_bounded(read, page.fetch_limit, lambda one: len(one.entry.body))
    except MagazineMissingError as exc:
        raise _unavailable_error() from exc
    if shown and found and principal.is_session:
        async with transaction(services.engine) as connection:
            await append(connection, payload_read(services, principal, request.scope))
    return page.respond(
        FailedMessagePage,
        found,
        lambda stored: _to_response(stored, with_payload=shown),
        position=_position_text,
        further=_position_text(found[-1]) if is_cut else None,
    )


@post(
    "/queues/{queue:str}/sideline/purge",
    status_code=200,
    opt=_WRITE,
    tags=_TAGS,
    summary="Purge a handler queue's sideline",
)
async def purge_queue_sideline(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    queue: QueuePath,
    confirm: Annotated[
        str | None,
        QueryParameter(description="The queue's name, to prevent purging by mistake."),
    ] = None,
) -> PurgeResponse:
    """Purge at most 10,000 messages a call; repeat it while `more` is true.

    A message that a shovel has just taken may be handled once more.
    """
    magazine = await _find_sideline(services, principal, queue)
    if confirm != queue:
        raise InvalidError(
            FieldProblem(
                "confirm", "repeat the queue's name here: purged deliveries cannot be restored"
            )
        )
    purged = 0
    after: Slot | None = None
    failure: BaseException | None = None
    try:
        for _ in range(MAX_PURGED // MAX_BATCH):
            async with services.magazine_turns.slot(principal.organisation_id):
                found = await magazine.peek_slots(MAX_BATCH, after=after)
                purged += len(await magazine.delete(found)) if found else 0
            after = found[-1] if len(found) == MAX_BATCH else None
            if after is None:
                break
    except MagazineMissingError as exc:
        failure = _unavailable_error()
        raise failure from exc
    except BaseException as exc:
        failure = exc
        raise
    finally:
        change.after = {"purged": purged}
        if purged or failure is None:
            await change.record(failure)
    return PurgeResponse(purged=purged, more=after is not None)


async def _find_sideline(services: ApiServices, principal: Principal, name: str) -> Magazine:
    async with transaction(services.engine) as connection:
        queue = await records.find_queue(connection, principal.organisation_id, name)
    try:
        async with services.magazine_turns.slot(principal.organisation_id):
            return await services.magazines.open(sideline_name(queue.store_name))
    except MagazineMissingError as exc:
        raise _unavailable_error() from exc


def _without_body(stored: StoredEntry) -> StoredEntry:
    """Return the entry without what is not shown: a page of them may have many mebibytes."""
    return replace(stored, entry=replace(stored.entry, body=b""))


def _unavailable_error() -> MagazineUnavailableError:
    return MagazineUnavailableError(
        "the queue's magazines do not exist: they are created again soon"
    )


def _to_response(stored: StoredEntry, *, with_payload: bool) -> FailedMessageResponse:
    entry = stored.entry
    return FailedMessageResponse(
        id=entry.id,
        reason=entry.reason,
        error=entry.detail,
        shovel_count=entry.shovels,
        sidelined_at=stored.loaded_at,
        taken_at=stored.fire_ts,
        expires_at=entry.expires_at,
        payload=msgspec.Raw(entry.body) if with_payload else UNSET,
    )


def _position_text(stored: StoredEntry) -> str:
    return f"{stored.slot.shard} {stored.slot.pointer}"


def _parse_position(text: str | None) -> Slot | None:
    if text is None:
        return None
    shard, _, pointer = text.partition(" ")
    return Slot(int(shard), int(pointer))


ROUTES: Final = [read_queue_sideline, purge_queue_sideline]
