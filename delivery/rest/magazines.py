"""`/v1/magazines`: the stores behind an organisation's sidelines and handler queues."""

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final

from litestar import Response, get, post
from litestar.params import PathParameter
from msgspec import Struct

from delivery.handlers.pair import names_of
from delivery.sideline.order import Order
from delivery.sideline.shelves import magazine_of
from rooms.domain.ids import SubscriptionId, is_id, room_of
from rooms.domain.job import JobKind
from rooms.domain.magazine import (
    SIDELINE_SUFFIX,
    MagazineName,
    MagazineState,
    ShardState,
    Slot,
    queue_of,
    sideline_of,
)
from rooms.domain.principal import Principal
from rooms.domain.queue import Queue
from rooms.domain.states import Scope
from rooms.errors import MagazineMissingError, NotFoundError
from rooms.magazines import Magazine
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.jobs import JobAccepted, accepted
from rooms.rest.pages import Cursor, Limit, cut, open_cursor, seal_cursor
from rooms.rest.problems import documented
from rooms.rest.services import Services
from rooms.storage import jobs as job_records
from rooms.storage.queues import find_queue, list_queues
from rooms.storage.sideline_pages import SidelineFilter, oldest_sidelined, sideline_count, with_sidelines
from rooms.storage.subscriptions import find_subscription
from rooms.storage.transactions import transaction

_LIST: Final = "magazines"
_TAGS: Final = ["magazines"]
_READ: Final = needs(Scope.OPERATE, Scope.MANAGE)
_PREFIX: Final = "subscription-"
_QUEUES: Final = "queue "
_LAST_POINTER: Final = (1 << 62) - 1

_SUMMED: Final = ("loaded", "fired", "deleted", "reloaded")

NamePath = Annotated[
    str, PathParameter(description="Its name: `subscription-{id}_SIDELINE`, `{queue}` or `{queue}_SIDELINE`.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfQueue:
    """One of the two magazines of a handler queue: `name` in the API, `stored` in the store."""

    queue: Queue
    name: MagazineName

    @property
    def stored(self) -> MagazineName:
        main, sideline = names_of(self.queue.store_name)
        return sideline if queue_of(self.name)[1] else main


Owned = SubscriptionId | OfQueue


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
    """A magazine: live entries by its own counters, and since when the oldest is there.

    Of a subscription's sideline `expected` is what PostgreSQL says should be there. It differs from `depth` for as long as
    entries are being loaded; for longer, the audit puts it right. What is in a handler queue the magazine alone knows.
    """

    name: str
    subscription_id: str | None
    queue: str | None
    depth: int
    expected: int | None
    oldest_at: datetime | None
    counters: CountersOut
    shards: list[ShardOut]


class MagazinePage(Struct, kw_only=True):
    """Magazines: of subscriptions, newest first, then of handler queues, by name."""

    items: list[MagazineOut]
    next_cursor: str | None


@get("/magazines", opt=_READ, responses=documented(), tags=_TAGS, summary="List magazines")
async def list_magazines(services: Given, principal: Caller, limit: Limit = 50, cursor: Cursor = None) -> MagazinePage:
    """The sidelines of the organisation that ever held something, and what handler queues have. 503 while their store is
    away.
    """
    page, last = cut(await _listed(services, principal, open_cursor(services.seal, _LIST, cursor), limit), limit, _text)
    return MagazinePage(
        items=[await _shown(services, one) for one in page],
        next_cursor=seal_cursor(services.seal, _LIST, last),
    )


@get("/magazines/{magazine:str}", opt=_READ, responses=documented(), tags=_TAGS, summary="Read a magazine")
async def read_magazine(services: Given, principal: Caller, magazine: NamePath) -> MagazineOut:
    """A magazine as its store sees it; one that never held anything is empty."""
    return await _shown(services, await _owned(services, principal, magazine))


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
    owned = await _owned(services, principal, magazine)
    arguments: dict[str, Any]
    if isinstance(owned, OfQueue):
        kind, room = JobKind.SWEEP_QUEUE, None
        arguments = {"queue": owned.queue.name, "store_name": owned.queue.store_name, "magazine": owned.name}
    else:
        kind, room = JobKind.SWEEP_SIDELINE, room_of(owned)
        arguments = Order(subscription=owned, wanted=SidelineFilter()).arguments()
    async with transaction(services.engine) as connection:
        job = await job_records.create_job(
            connection,
            principal.organisation_id,
            kind,
            new_id=services.ids.global_id(services.clock.now_ms()),
            room=room,
            arguments=arguments,
        )
    return accepted(job)


async def _listed(services: Services, principal: Principal, after: str | None, limit: int) -> list[Owned]:
    """The magazines behind that position, one more than fits."""
    found: list[Owned] = []
    name = None if after is None or not after.startswith(_QUEUES) else MagazineName(after.removeprefix(_QUEUES))
    async with transaction(services.engine) as connection:
        if name is None:
            found += await with_sidelines(connection, principal.organisation_id, before=after, limit=limit + 1)
        left = limit + 1 - len(found)
        if left <= 0:
            return found
        last, aside = (None, True) if name is None else queue_of(name)
        if last is not None and not aside:
            with suppress(NotFoundError):  # deleted between the pages
                queue = await find_queue(connection, principal.organisation_id, last)
                found.append(OfQueue(queue=queue, name=sideline_of(last)))
        queues = await list_queues(connection, principal.organisation_id, after=last, limit=left)
    return found + [OfQueue(queue=one, name=magazine) for one in queues for magazine in names_of(one.name)]


def _text(one: Owned) -> str:
    return f"{_QUEUES}{one.name}" if isinstance(one, OfQueue) else str(one)


async def _owned(services: Services, principal: Principal, name: str) -> Owned:
    identity = name.removeprefix(_PREFIX).removesuffix(SIDELINE_SUFFIX)
    async with transaction(services.engine) as connection:
        if is_id(identity) and name == magazine_of(SubscriptionId(identity)):
            return (await find_subscription(connection, principal.organisation_id, SubscriptionId(identity))).id
        try:
            queue = await find_queue(connection, principal.organisation_id, name.removesuffix(SIDELINE_SUFFIX))
        except NotFoundError as exc:
            raise NotFoundError("there is no such magazine") from exc
    return OfQueue(queue=queue, name=MagazineName(name))


async def _shown(services: Services, one: Owned) -> MagazineOut:
    name = one.name if isinstance(one, OfQueue) else magazine_of(one)
    oldest_at = expected = None
    try:
        magazine = await services.magazines.open(one.stored if isinstance(one, OfQueue) else name)
        state = await magazine.state()
        if isinstance(one, OfQueue):
            oldest_at = await _oldest(magazine)
    except MagazineMissingError:
        state = MagazineState(name=name, shards=(), swept=0)
    if not isinstance(one, OfQueue):
        async with transaction(services.engine) as connection:
            expected = await sideline_count(connection, room_of(one), one, SidelineFilter())
            oldest_at = await oldest_sidelined(connection, room_of(one), one)
    counters = CountersOut(
        **{field: sum(getattr(shard, field) for shard in state.shards) for field in _SUMMED}, swept=state.swept
    )
    return MagazineOut(
        name=name,
        subscription_id=None if isinstance(one, OfQueue) else one,
        queue=one.queue.name if isinstance(one, OfQueue) else None,
        depth=state.depth,
        expected=expected,
        oldest_at=oldest_at,
        counters=counters,
        shards=[_shard(shard) for shard in state.shards],
    )


async def _oldest(magazine: Magazine) -> datetime | None:
    """When the oldest entry was loaded: the first of each shard that has any."""
    oldest: datetime | None = None
    after: Slot | None = None
    while found := await magazine.peek(1, after=after):
        (first,) = found
        oldest = first.loaded_at if oldest is None else min(oldest, first.loaded_at)
        after = Slot(first.slot.shard, _LAST_POINTER)
    return oldest


def _shard(shard: ShardState) -> ShardOut:
    return ShardOut(**{field: getattr(shard, field) for field in ShardOut.__struct_fields__})


ROUTES: Final = [list_magazines, read_magazine, sweep]
