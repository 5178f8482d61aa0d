"""`/v1/magazines`: the stores behind the sidelines of an organisation's subscriptions."""

from datetime import datetime
from typing import Annotated, Final

from litestar import Response, get, post
from litestar.params import PathParameter
from msgspec import Struct

from delivery.sideline.order import Order
from delivery.sideline.shelves import magazine_of
from rooms.domain.ids import RoomId, SubscriptionId, is_id, room_of
from rooms.domain.magazine import SIDELINE_SUFFIX, MagazineState, ShardState
from rooms.domain.principal import Principal
from rooms.domain.states import Scope
from rooms.errors import MagazineMissingError, NotFoundError
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.jobs import JobAccepted, accepted
from rooms.rest.pages import Cursor, Limit, cut, open_cursor, seal_cursor
from rooms.rest.problems import documented
from rooms.rest.services import Services
from rooms.storage import jobs as job_records
from rooms.storage.sideline_pages import SidelineFilter, oldest_sidelined, sideline_count, with_sidelines
from rooms.storage.subscriptions import find_subscription
from rooms.storage.transactions import transaction

_LIST: Final = "magazines"
_TAGS: Final = ["magazines"]
_READ: Final = needs(Scope.OPERATE, Scope.MANAGE)
_PREFIX: Final = "subscription-"

_SUMMED: Final = ("loaded", "fired", "deleted", "reloaded")

NamePath = Annotated[str, PathParameter(description="The magazine's name, `subscription-{id}_SIDELINE`.")]


class ShardOut(Struct, kw_only=True):
    """One shard: pointers (the next slot to load, to fire, and below which nothing is alive) and counters."""

    shard: int
    load_pointer: int
    fire_pointer: int
    sweep_pointer: int
    epoch: int
    loaded: int
    fired: int
    deleted: int
    reloaded: int


class CountersOut(Struct, kw_only=True):
    """Entries since the magazine was made. After a store left an answer in doubt they may be off; PostgreSQL counts true."""

    loaded: int
    fired: int
    deleted: int
    reloaded: int
    swept: int


class MagazineOut(Struct, kw_only=True):
    """A magazine: live entries by its own counters, what PostgreSQL says should be there, and how long the oldest rests.

    `depth` and `expected` differ for as long as entries are being loaded; for longer, the audit puts it right.
    """

    name: str
    subscription_id: str
    depth: int
    expected: int
    oldest_at: datetime | None
    counters: CountersOut
    shards: list[ShardOut]


class MagazinePage(Struct, kw_only=True):
    """Magazines, newest subscription first."""

    items: list[MagazineOut]
    next_cursor: str | None


@get("/magazines", opt=_READ, responses=documented(), tags=_TAGS, summary="List magazines")
async def list_magazines(services: Given, principal: Caller, limit: Limit = 50, cursor: Cursor = None) -> MagazinePage:
    """The sidelines of the organisation that ever held something. 503 while their store is away."""
    before = open_cursor(services.seal, _LIST, cursor)
    async with transaction(services.engine) as connection:
        found = await with_sidelines(connection, principal.organisation_id, before=before, limit=limit + 1)
    page, last = cut(found, limit, str)
    return MagazinePage(
        items=[await _magazine(services, identity) for identity in page],
        next_cursor=None if last is None else seal_cursor(services.seal, _LIST, last),
    )


@get("/magazines/{magazine:str}", opt=_READ, responses=documented(), tags=_TAGS, summary="Read a magazine")
async def read_magazine(services: Given, principal: Caller, magazine: NamePath) -> MagazineOut:
    """A subscription's sideline as its store sees it; one that never held anything is empty."""
    identity, _ = await _owned(services, principal, magazine)
    return await _magazine(services, identity)


@post(
    "/magazines/{magazine:str}/sweep",
    status_code=202,
    opt=needs(Scope.OPERATE),
    responses=documented(),
    tags=_TAGS,
    summary="Sweep a magazine now",
)
async def sweep(services: Given, principal: Caller, magazine: NamePath) -> Response[JobAccepted]:
    """202 with the job; the member that sweeps does it, within its epoch."""
    identity, room = await _owned(services, principal, magazine)
    order = Order(subscription=identity, wanted=SidelineFilter())
    async with transaction(services.engine) as connection:
        job = await job_records.create_job(
            connection,
            principal.organisation_id,
            job_records.JobKind.SWEEP_SIDELINE,
            new_id=services.ids.global_id(services.clock.now_ms()),
            room=room,
            arguments=order.arguments(),
        )
    return accepted(job)


async def _owned(services: Services, principal: Principal, name: str) -> tuple[SubscriptionId, RoomId]:
    identity = name.removeprefix(_PREFIX).removesuffix(SIDELINE_SUFFIX)
    if not is_id(identity) or name != magazine_of(SubscriptionId(identity)):
        raise NotFoundError("there is no such magazine")
    async with transaction(services.engine) as connection:
        found = await find_subscription(connection, principal.organisation_id, SubscriptionId(identity))
    return found.id, found.room_id


async def _magazine(services: Services, identity: SubscriptionId) -> MagazineOut:
    name, room = magazine_of(identity), room_of(identity)
    try:
        state = await (await services.magazines.open(name)).state()
    except MagazineMissingError:
        state = MagazineState(name=name, shards=(), swept=0)
    async with transaction(services.engine) as connection:
        expected = await sideline_count(connection, room, identity, SidelineFilter())
        oldest_at = await oldest_sidelined(connection, room, identity)
    counters = CountersOut(
        **{field: sum(getattr(shard, field) for shard in state.shards) for field in _SUMMED}, swept=state.swept
    )
    return MagazineOut(
        name=name,
        subscription_id=identity,
        depth=state.depth,
        expected=expected,
        oldest_at=oldest_at,
        counters=counters,
        shards=[_shard(shard) for shard in state.shards],
    )


def _shard(shard: ShardState) -> ShardOut:
    return ShardOut(**{field: getattr(shard, field) for field in ShardOut.__struct_fields__})


ROUTES: Final = [list_magazines, read_magazine, sweep]
