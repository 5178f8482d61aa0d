"""`/v1/subscriptions/{id}/ordering-keys`: what is under way of each key of an ordered subscription, and the way past a head."""

from datetime import datetime
from typing import Annotated, Final

from litestar import get, post
from litestar.params import JSONBody, QueryParameter
from msgspec import Meta, Struct

from rooms.domain.states import Scope, State, SubscriptionType
from rooms.errors import ConflictError
from rooms.publishing.request import MAX_TEXT
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.bodies import Body
from rooms.rest.pages import Cursor, Limit, cut, open_cursor, seal_cursor
from rooms.rest.paths import IdPath
from rooms.rest.problems import documented
from rooms.rest.subscriptions import parse_subscription
from rooms.storage import subscriptions as records
from rooms.storage.order import Order
from rooms.storage.order_views import list_keys
from rooms.storage.transactions import transaction

_LIST: Final = "ordering-keys"
_TAGS: Final = ["subscriptions"]


class OrderingKeyOut(Struct, kw_only=True):
    """An ordering key. `head`: its delivery that is out, in `state` since `since`; one that is sidelined parks the key.
    `waiting`: how many deliveries wait behind it, 10,000 at most.
    """

    ordering_key: str
    head: str
    state: State
    since: datetime
    waiting: int


class OrderingKeyPage(Struct, kw_only=True):
    """Ordering keys, in no order that means anything."""

    items: list[OrderingKeyOut]
    next_cursor: str | None


class Skip(Struct, forbid_unknown_fields=True, kw_only=True):
    """The key to go on with."""

    ordering_key: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]


class Skipped(Struct, kw_only=True):
    """The delivery that was passed by, which stays sidelined; `called`: whether another one was waiting and is out now."""

    skipped: str
    called: bool


@get(
    "/subscriptions/{subscription_id:str}/ordering-keys",
    opt=needs(Scope.MANAGE, Scope.OPERATE),
    responses=documented(),
    tags=_TAGS,
    summary="List ordering keys that are under way",
)
async def list_ordering_keys(
    *,
    services: Given,
    principal: Caller,
    subscription_id: IdPath,
    limit: Limit = 50,
    cursor: Cursor = None,
    parked: Annotated[bool, QueryParameter(description="Only those whose head is sidelined.")] = False,
) -> OrderingKeyPage:
    """The keys of an ordered subscription under which something is unfinished or sidelined; of any other there are none."""
    identity = parse_subscription(subscription_id)
    after = open_cursor(services.seal, _LIST, cursor)
    async with transaction(services.engine) as connection:
        await records.find_subscription(connection, principal.organisation_id, identity)
        found = await list_keys(connection, identity, parked=parked, after=bytes.fromhex(after or ""), limit=limit + 1)
    page, last = cut(found, limit, lambda key: key.digest.hex())
    return OrderingKeyPage(
        items=[
            OrderingKeyOut(
                ordering_key=key.ordering_key, head=key.head, state=key.state, since=key.since, waiting=key.waiting
            )
            for key in page
        ],
        next_cursor=seal_cursor(services.seal, _LIST, last),
    )


@post(
    "/subscriptions/{subscription_id:str}/ordering-keys/skip",
    status_code=200,
    dto=Body[Skip],
    return_dto=None,
    opt=needs(Scope.OPERATE),
    responses=documented(409),
    tags=_TAGS,
    summary="Go on behind a sidelined head",
)
async def skip_head(services: Given, principal: Caller, subscription_id: IdPath, data: JSONBody[Skip]) -> Skipped:
    """What was passed by. It has lost its place: shoveled later, it goes out beside the others. 409: the key is not parked."""
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        found = await records.find_subscription(connection, principal.organisation_id, identity)
    skipped, called = await Order(services.writer).skip(identity, data.ordering_key)
    if skipped is None:
        raise ConflictError("no delivery of this key is sidelined as the first of those that are not over")
    if called:
        services.signals.ring_queued(identity if found.type is SubscriptionType.PULL else None)
    return Skipped(skipped=skipped, called=called)


ROUTES: Final = [list_ordering_keys, skip_head]
