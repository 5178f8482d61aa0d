"""Serve `/v1/subscriptions/{id}/ordering-keys`: keys under way, and skipping a blocked head."""

from datetime import datetime
from typing import Annotated, Final

from litestar import get, post
from litestar.params import JSONBody, QueryParameter
from msgspec import Meta, Struct

from rooms.api.auth import (
    OF_SUBSCRIPTIONS,
    Caller,
    ServicesDep,
    for_portals,
    require_scopes,
)
from rooms.api.changes import ChangeDep
from rooms.api.codec import Body
from rooms.api.errors import documented_responses
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import IdPath
from rooms.api.subscriptions import parse_subscription
from rooms.db.catalog import subscriptions as records
from rooms.db.connection import transaction
from rooms.db.queries.throttle import list_active_keys, may_know_of_head
from rooms.db.queue.ordering import OrderingQueries, key_digest
from rooms.domain.state_machine import Scope, State, SubscriptionType
from rooms.errors import ConflictError
from rooms.publishing.request import MAX_TEXT

_LIST: Final = "ordering-keys"
_TAGS: Final = ["subscriptions"]


class OrderingKeyResponse(Struct, kw_only=True):
    """Describe an ordering key.

    `head`: its delivery under way, in `state` since `since`; a sidelined head blocks the key.
    `waiting`: the deliveries behind it, counted up to 10,000; in another organisation's room those
    that are known among the next 1,000.
    """

    ordering_key: str
    head: str
    state: State
    since: datetime
    waiting: int


class OrderingKeyPage(Struct, kw_only=True):
    """List ordering keys, in no particular order."""

    items: list[OrderingKeyResponse]
    next_cursor: str | None


class SkipOrderingKey(Struct, forbid_unknown_fields=True, kw_only=True):
    """Name the key to unblock."""

    ordering_key: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]


class SkipResponse(Struct, kw_only=True):
    """Describe the skipped delivery, which stays sidelined.

    `called`: another one started; in another organisation's room, one that is due and not held by a
    suspension.
    """

    skipped: str
    called: bool


@get(
    "/subscriptions/{subscription_id:str}/ordering-keys",
    opt=for_portals(require_scopes(Scope.MANAGE, Scope.OPERATE, allows=OF_SUBSCRIPTIONS)),
    tags=_TAGS,
    summary="List active ordering keys",
)
async def list_ordering_keys(
    *,
    services: ServicesDep,
    principal: Caller,
    subscription_id: IdPath,
    limit: Limit = 50,
    cursor: Cursor = None,
    parked: Annotated[
        bool, QueryParameter(description="Only those whose head is sidelined.")
    ] = False,
) -> OrderingKeyPage:
    """List the keys of an ordered subscription with unfinished or sidelined deliveries.

    In another organisation's room, those whose head is due and not held by a suspension. There a
    call looks at about 2,000 keys, so a page may have few or no items while `next_cursor` is set.
    """
    identity = parse_subscription(subscription_id)
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    async with transaction(services.engine) as connection:
        await records.find_subscription(connection, principal, identity)
        scan = await list_active_keys(
            connection,
            identity,
            blocked=parked,
            after=bytes.fromhex(page.after or ""),
            limit=page.fetch_limit,
        )
    return page.respond(
        OrderingKeyPage,
        scan.found,
        lambda key: OrderingKeyResponse(
            ordering_key=key.ordering_key,
            head=key.head,
            state=key.state,
            since=key.since,
            waiting=key.waiting,
        ),
        position=lambda key: key.digest.hex(),
        further=scan.further,
    )


@post(
    "/subscriptions/{subscription_id:str}/ordering-keys/skip",
    status_code=200,
    dto=Body[SkipOrderingKey],
    return_dto=None,
    opt=for_portals(require_scopes(Scope.OPERATE, allows=OF_SUBSCRIPTIONS)),
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Skip a sidelined head",
)
async def skip_head(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    subscription_id: IdPath,
    data: JSONBody[SkipOrderingKey],
) -> SkipResponse:
    """Skip the sidelined head of a key.

    It loses its place: after a later shovel it is delivered without order. 409: the key is not
    blocked.
    """
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        found = await records.find_subscription(connection, principal, identity)
    async with services.writer_turns.turn(principal.organisation_id) as writer:
        skipped, called = await OrderingQueries(writer).skip(identity, data.ordering_key)
    if skipped is None:
        raise ConflictError(
            "the key is not blocked: its first unfinished delivery is not sidelined"
        )
    if called:
        services.notifier.notify_queued(identity if found.type is SubscriptionType.PULL else None)
    await change.record()
    if called:
        async with transaction(services.engine) as connection:
            called = await may_know_of_head(connection, identity, key_digest(data.ordering_key))
    return SkipResponse(skipped=skipped, called=called)


ROUTES: Final = [list_ordering_keys, skip_head]
