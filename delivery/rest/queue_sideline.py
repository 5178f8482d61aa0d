"""`/v1/queues/{queue}/sideline`: looking through what handlers failed at, and ending it."""

from datetime import datetime
from typing import Annotated, Final

import msgspec
from litestar import get, post
from litestar.params import QueryParameter
from msgspec import Struct

from delivery.rest.queues import QueuePath
from rooms.domain.magazine import MAX_BATCH, Slot, Stored, sideline_of
from rooms.domain.principal import Principal
from rooms.domain.states import Scope
from rooms.errors import FieldProblem, InvalidError, MagazineMissingError, MagazineUnavailableError
from rooms.magazines import Magazine
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.pages import Cursor, Limit, cut, open_cursor, seal_cursor
from rooms.rest.problems import documented
from rooms.rest.services import Services
from rooms.storage import queues as records
from rooms.storage.transactions import transaction

_LIST: Final = "queue sideline"
_TAGS: Final = ["queues"]
_READ: Final = needs(Scope.MANAGE, Scope.OPERATE)
_WRITE: Final = needs(Scope.OPERATE)
MOST: Final = 10_000
"""Messages that one call ends."""


class FailedOut(Struct, kw_only=True):
    """A message that a handler failed at. `taken_at`: when a shovel or sweeper has it since; null: it waits."""

    id: str
    reason: str | None
    error: str | None
    shovel_count: int
    sidelined_at: datetime
    taken_at: datetime | None
    expires_at: datetime | None
    payload: msgspec.Raw


class FailedPage(Struct, kw_only=True):
    """Messages of a sideline, shard by shard, in a shard as they were sidelined."""

    items: list[FailedOut]
    next_cursor: str | None


class Purged(Struct, kw_only=True):
    """How many are gone. `more`: there may be others; ask again."""

    purged: int
    more: bool


@get(
    "/queues/{queue:str}/sideline",
    opt=_READ,
    responses=documented(),
    tags=_TAGS,
    summary="Look through a handler queue's sideline",
)
async def read_queue_sideline(
    services: Given, principal: Caller, queue: QueuePath, limit: Limit = 50, cursor: Cursor = None
) -> FailedPage:
    """What handlers failed at, and why. What comes or goes meanwhile may or may not be on a later page."""
    position = open_cursor(services.seal, _LIST, cursor)
    magazine = await _sideline(services, principal, queue)
    try:
        found = await magazine.peek(limit + 1, after=_slot(position))
    except MagazineMissingError as exc:
        raise _away() from exc
    page, last = cut(found, limit, _text)
    return FailedPage(
        items=[_out(one) for one in page],
        next_cursor=seal_cursor(services.seal, _LIST, last),
    )


@post(
    "/queues/{queue:str}/sideline/purge",
    status_code=200,
    opt=_WRITE,
    responses=documented(),
    tags=_TAGS,
    summary="End messages of a handler queue's sideline",
)
async def purge_queue_sideline(
    services: Given,
    principal: Caller,
    queue: QueuePath,
    confirm: Annotated[
        str | None, QueryParameter(description="The queue's name, so that nobody purges by mistake.")
    ] = None,
) -> Purged:
    """At most 10,000 a call; repeat it while there are more. What a shovel has just taken may be handled once more."""
    magazine = await _sideline(services, principal, queue)
    if confirm != queue:
        raise InvalidError(FieldProblem("confirm", "repeat the queue's name here: what is purged is gone"))
    purged, after = 0, None
    try:
        for _ in range(MOST // MAX_BATCH):
            found = await magazine.peek(MAX_BATCH, after=after)
            purged += len(await magazine.delete([one.slot for one in found])) if found else 0
            if len(found) < MAX_BATCH:
                return Purged(purged=purged, more=False)
            after = found[-1].slot
    except MagazineMissingError as exc:
        raise _away() from exc
    return Purged(purged=purged, more=True)


async def _sideline(services: Services, principal: Principal, name: str) -> Magazine:
    async with transaction(services.engine) as connection:
        queue = await records.find_queue(connection, principal.organisation_id, name)
    try:
        return await services.magazines.open(sideline_of(queue.store_name))
    except MagazineMissingError as exc:
        raise _away() from exc


def _away() -> MagazineUnavailableError:
    return MagazineUnavailableError("the queue's magazines are not there: they are made anew soon")


def _out(one: Stored) -> FailedOut:
    entry = one.entry
    return FailedOut(
        id=entry.id,
        reason=entry.reason,
        error=entry.detail,
        shovel_count=entry.shovels,
        sidelined_at=one.loaded_at,
        taken_at=one.fire_ts,
        expires_at=entry.expires_at,
        payload=msgspec.Raw(entry.body),
    )


def _text(one: Stored) -> str:
    return f"{one.slot.shard} {one.slot.pointer}"


def _slot(text: str | None) -> Slot | None:
    if text is None:
        return None
    shard, _, pointer = text.partition(" ")
    return Slot(int(shard), int(pointer))


ROUTES: Final = [read_queue_sideline, purge_queue_sideline]
