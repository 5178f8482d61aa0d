"""Serve `/v1/magazines`: the stores behind an organisation's sidelines and handler queues."""

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final

from litestar import Response, get, post
from litestar.params import PathParameter
from msgspec import Struct

from delivery.handlers.magazines import magazine_names
from delivery.sideline.magazines import sideline_magazine_name
from delivery.sideline.shovel import ShovelRequest
from rooms.api.auth import Caller, ServicesDep, require_scopes
from rooms.api.changes import ChangeDep
from rooms.api.deps import ApiServices
from rooms.api.jobs import JobAccepted, accepted_response
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.db.catalog.handler_queues import find_queue, list_queues
from rooms.db.catalog.subscriptions import find_subscription
from rooms.db.connection import transaction
from rooms.db.jobs.requests import request_job
from rooms.db.sideline.queries import (
    SidelineFilter,
    list_sidelined_subscriptions,
    oldest_sidelined,
    sideline_count,
)
from rooms.domain.handler_queue import HandlerQueue
from rooms.domain.ids import SubscriptionId, is_id, room_of
from rooms.domain.job import JobKind
from rooms.domain.magazine import (
    SIDELINE_SUFFIX,
    MagazineName,
    MagazineState,
    ShardState,
    queue_from_magazine,
    sideline_name,
)
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import MagazineMissingError, NotFoundError

_LIST: Final = "magazines"
_TAGS: Final = ["magazines"]
_READ: Final = require_scopes(Scope.OPERATE, Scope.MANAGE)
_SUBSCRIPTION_PREFIX: Final = "subscription-"
_QUEUE_POSITION_PREFIX: Final = "queue "

_SUMMED_COUNTERS: Final = ("loaded", "fired", "deleted", "reloaded")

NamePath = Annotated[
    str,
    PathParameter(
        description="Its name: `subscription-{id}_SIDELINE`, `{queue}` or `{queue}_SIDELINE`."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerQueueMagazine:
    """Identify one of a handler queue's two magazines by its name in the API and in the store."""

    queue: HandlerQueue
    name: MagazineName

    @property
    def stored_name(self) -> MagazineName:
        main, sideline = magazine_names(self.queue.store_name)
        return sideline if queue_from_magazine(self.name)[1] else main


@dataclass(frozen=True, slots=True, kw_only=True)
class SidelineMagazine:
    """Identify the magazine of a subscription's sideline."""

    subscription: SubscriptionId
    subscription_name: str

    @property
    def name(self) -> MagazineName:
        return sideline_magazine_name(self.subscription)


MagazineOwner = SidelineMagazine | HandlerQueueMagazine


class CountersResponse(Struct, kw_only=True):
    """Count entries since the magazine was created.

    An ambiguous answer of the store may make them inexact; PostgreSQL has the exact counts.
    """

    loaded: int
    fired: int
    deleted: int
    reloaded: int
    swept: int


class MagazineResponse(Struct, kw_only=True):
    """Describe a magazine: its live entries by its own counters, and when the oldest was loaded.

    `expected`: the number of entries of a subscription's sideline according to PostgreSQL. It
    differs from `depth` while entries are loaded; after that the audit corrects it. It is null for
    handler queues, which only the magazine records.
    """

    name: str
    subscription_id: str | None
    subscription_name: str | None
    queue: str | None
    depth: int
    expected: int | None
    oldest_at: datetime | None
    counters: CountersResponse
    shards: list[ShardState]


class MagazinePage(Struct, kw_only=True):
    """List magazines: of subscriptions, newest first, then of handler queues, by name."""

    items: list[MagazineResponse]
    next_cursor: str | None


@get("/magazines", opt=_READ, tags=_TAGS, summary="List magazines")
async def list_magazines(
    services: ServicesDep, principal: Caller, limit: Limit = 50, cursor: Cursor = None
) -> MagazinePage:
    """List the sidelines that ever had an entry, and the magazines of handler queues.

    503: the store of the magazines does not answer.
    """
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    found = await _list_owners(services, principal, page.after, page.fetch_limit)
    owners, next_cursor = page.split(found, _position_text)
    return MagazinePage(
        items=[await _to_response(services, principal, owner) for owner in owners],
        next_cursor=next_cursor,
    )


@get("/magazines/{magazine:str}", opt=_READ, tags=_TAGS, summary="Read a magazine")
async def read_magazine(
    services: ServicesDep, principal: Caller, magazine: NamePath
) -> MagazineResponse:
    """Return a magazine as its store counts it; a magazine that was never used is empty."""
    owner = await _find_owner(services, principal, magazine)
    return await _to_response(services, principal, owner)


@post(
    "/magazines/{magazine:str}/sweep",
    status_code=202,
    opt=require_scopes(Scope.OPERATE),
    tags=_TAGS,
    summary="Sweep a magazine now",
)
async def sweep(
    services: ServicesDep, principal: Caller, change: ChangeDep, magazine: NamePath
) -> Response[JobAccepted]:
    """Start a sweep, which the member that owns it runs within its epoch."""
    owned = await _find_owner(services, principal, magazine)
    arguments: dict[str, Any]
    if isinstance(owned, HandlerQueueMagazine):
        kind, room = JobKind.SWEEP_QUEUE, None
        arguments = {
            "queue": owned.queue.name,
            "store_name": owned.queue.store_name,
            "magazine": owned.name,
        }
    else:
        kind, room = JobKind.SWEEP_SIDELINE, room_of(owned.subscription)
        arguments = ShovelRequest(
            subscription=owned.subscription, selection=SidelineFilter()
        ).to_arguments()
    async with change.transaction() as connection:
        job = await request_job(
            connection,
            principal.organisation_id,
            kind,
            new_id=services.ids.generate_global(services.clock.now_ms()),
            room=room,
            arguments=arguments,
        )
    return accepted_response(job)


async def _list_owners(
    services: ApiServices, principal: Principal, after: str | None, limit: int
) -> list[MagazineOwner]:
    """Return at least the next `limit` magazines after that position, where there are so many."""
    found: list[MagazineOwner] = []
    name = (
        None
        if after is None or not after.startswith(_QUEUE_POSITION_PREFIX)
        else MagazineName(after.removeprefix(_QUEUE_POSITION_PREFIX))
    )
    async with transaction(services.engine) as connection:
        if name is None:
            sidelined = await list_sidelined_subscriptions(
                connection, principal, before=after, limit=limit
            )
            found += [
                SidelineMagazine(subscription=identity, subscription_name=subscription_name)
                for identity, subscription_name in sidelined
            ]
        left = limit - len(found)
        if left <= 0:
            return found
        last, sideline = (None, True) if name is None else queue_from_magazine(name)
        if last is not None and not sideline:
            with suppress(NotFoundError):  # deleted between two pages
                queue = await find_queue(connection, principal.organisation_id, last)
                found.append(HandlerQueueMagazine(queue=queue, name=sideline_name(last)))
        queues = await list_queues(connection, principal.organisation_id, after=last, limit=left)
    return found + [
        HandlerQueueMagazine(queue=one, name=magazine)
        for one in queues
        for magazine in magazine_names(one.name)
    ]


def _position_text(owner: MagazineOwner) -> str:
    return (
        f"{_QUEUE_POSITION_PREFIX}{owner.name}"
        if isinstance(owner, HandlerQueueMagazine)
        else str(owner.subscription)
    )


async def _find_owner(services: ApiServices, principal: Principal, name: str) -> MagazineOwner:
    identity = name.removeprefix(_SUBSCRIPTION_PREFIX).removesuffix(SIDELINE_SUFFIX)
    async with transaction(services.engine) as connection:
        if is_id(identity) and name == sideline_magazine_name(SubscriptionId(identity)):
            found = await find_subscription(connection, principal, SubscriptionId(identity))
            return SidelineMagazine(subscription=found.id, subscription_name=found.name)
        try:
            queue = await find_queue(
                connection, principal.organisation_id, name.removesuffix(SIDELINE_SUFFIX)
            )
        except NotFoundError as exc:
            raise NotFoundError("there is no such magazine") from exc
    return HandlerQueueMagazine(queue=queue, name=MagazineName(name))


async def _to_response(
    services: ApiServices, principal: Principal, owner: MagazineOwner
) -> MagazineResponse:
    oldest_at = expected = None
    name = owner.stored_name if isinstance(owner, HandlerQueueMagazine) else owner.name
    try:
        async with services.magazine_turns.slot(principal.organisation_id):
            magazine = await services.magazines.open(name)
            state = await magazine.state()
            if isinstance(owner, HandlerQueueMagazine):
                oldest_at = await magazine.oldest_loaded_at()
    except MagazineMissingError:
        state = MagazineState(name=owner.name, shards=(), swept=0)
    if isinstance(owner, SidelineMagazine):
        subscription, room = owner.subscription, room_of(owner.subscription)
        async with transaction(services.engine) as connection:
            expected = await sideline_count(connection, room, subscription, SidelineFilter())
            oldest_at = await oldest_sidelined(connection, room, subscription)
    counters = CountersResponse(
        **{
            field: sum(getattr(shard, field) for shard in state.shards)
            for field in _SUMMED_COUNTERS
        },
        swept=state.swept,
    )
    return MagazineResponse(
        name=owner.name,
        subscription_id=owner.subscription if isinstance(owner, SidelineMagazine) else None,
        subscription_name=owner.subscription_name if isinstance(owner, SidelineMagazine) else None,
        queue=owner.queue.name if isinstance(owner, HandlerQueueMagazine) else None,
        depth=state.depth,
        expected=expected,
        oldest_at=oldest_at,
        counters=counters,
        shards=list(state.shards),
    )


ROUTES: Final = [list_magazines, read_magazine, sweep]
