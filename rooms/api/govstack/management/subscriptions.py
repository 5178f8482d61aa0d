"""Serve `/rooms/{memberId}/{roomId}/subscriptions`: list, make, decide and end them."""

from typing import Annotated, Any, Final

from litestar import Response, delete, get, post
from litestar.di import NamedDependency, Provide
from litestar.params import JSONBody, SkipValidation
from msgspec import Meta, Struct

from rooms.api import subscription_approval, subscription_creation, subscriptions
from rooms.api.codec import Body
from rooms.api.govstack.management.delegation import ROOM, MemberCallDep, delegate, list_route
from rooms.api.govstack.operations import Reply, problem
from rooms.api.params import IdPath
from rooms.api.subscription_bodies import (
    CreatedSubscription,
    CreateSubscription,
    SubscriptionResponse,
)
from rooms.api.subscription_creation import SubscriptionCreator, provide_creator
from rooms.db.queries.subscription_counts import SubscriptionCounts
from rooms.errors import FieldProblem, InvalidError


class DecideSubscription(Struct, forbid_unknown_fields=True, kw_only=True):
    """Approve or reject; to approve, `version` is the subscription's, as it was shown."""

    approved: bool
    version: Annotated[int, Meta(ge=1, le=0x7FFF_FFFF)] | None = None
    reason: subscription_approval.Reason | None = None


@post(
    ROOM + "/subscriptions",
    dto=Body[CreateSubscription],
    return_dto=None,
    dependencies={"creator": Provide(provide_creator)},
    opt=delegate(
        subscription_creation.create_subscription,
        (201, Reply("The subscription", CreatedSubscription)),
        (409, problem("The name is taken, or a quota is used up")),
        body=CreateSubscription,
    ),
    summary="Subscribe",
)
async def create_room_subscription(
    *,
    data: JSONBody[CreateSubscription],
    call: MemberCallDep,
    creator: NamedDependency[SkipValidation[SubscriptionCreator]],
) -> Response[CreatedSubscription]:
    """Create a subscription. One with PULL has `ack_by_next_pull`, unless it is given as false."""
    if data.type.value == "PULL" and data.ack_by_next_pull is None:
        data.ack_by_next_pull = not (data.native or data.operational)
    found: Response[CreatedSubscription] = await call(
        subscription_creation.create_subscription, data=data, creator=creator
    )
    return found


@get(
    ROOM + "/subscriptions/{subscription_id:str}",
    opt=delegate(
        subscriptions.read_subscription, (200, Reply("The subscription", SubscriptionResponse))
    ),
    summary="Read a subscription",
)
async def read_room_subscription(
    call: MemberCallDep, subscription_id: IdPath
) -> SubscriptionResponse:
    """Return a subscription to its subscriber, and a part of it to the room's owner."""
    found: SubscriptionResponse = await call.of_subscription(
        subscriptions.read_subscription, subscription_id
    )
    return found


@post(
    ROOM + "/subscriptions/{subscription_id:str}",
    status_code=200,
    dto=Body[DecideSubscription],
    return_dto=None,
    opt=delegate(
        subscription_approval.approve_subscription,
        (200, Reply("The subscription", SubscriptionResponse)),
        (409, problem("It has changed since, or nothing waits for approval")),
        body=DecideSubscription,
    ),
    summary="Approve or reject a subscription",
)
async def decide_room_subscription(
    *, data: JSONBody[DecideSubscription], call: MemberCallDep, subscription_id: IdPath
) -> SubscriptionResponse:
    """Decide about what waits: a new subscription, or a change of one. For the room's owner."""
    body: Any
    if data.approved:
        handler: Any = subscription_approval.approve_subscription
        if data.version is None:
            raise InvalidError(
                FieldProblem("version", "is missing: give that of the subscription you looked at")
            )
        body = subscription_approval.Approve(version=data.version, reason=data.reason)
    else:
        handler = subscription_approval.reject_subscription
        body = subscription_approval.Decide(reason=data.reason)
    found: SubscriptionResponse = await call.of_subscription(handler, subscription_id, data=body)
    return found


@delete(
    ROOM + "/subscriptions/{subscription_id:str}",
    opt=delegate(
        subscription_approval.terminate_subscription,
        (204, Reply("It is terminated")),
        (409, problem("It has ended")),
    ),
    summary="Terminate a subscription",
)
async def terminate_room_subscription(call: MemberCallDep, subscription_id: IdPath) -> None:
    """End a subscription for good. For the subscriber and the room's owner."""
    await call.of_subscription(subscription_approval.terminate_subscription, subscription_id)


@get(
    ROOM + "/subscriptions/{subscription_id:str}/queue",
    opt=delegate(subscription_approval.read_counts, (200, Reply("The counts", SubscriptionCounts))),
    summary="Count what waits for a subscription",
)
async def read_room_queue(call: MemberCallDep, subscription_id: IdPath) -> SubscriptionCounts:
    """Count what waits, is held, leased or sidelined. For the subscriber and the room's owner."""
    found: SubscriptionCounts = await call.of_subscription(
        subscription_approval.read_counts, subscription_id
    )
    return found


ROUTES: Final = [
    list_route(
        ROOM + "/subscriptions",
        subscriptions.list_subscriptions,
        subscriptions.SubscriptionPage,
        name="list_room_subscriptions",
        about="List the room's subscriptions to its owner, and to others their own, newest first.",
    ),
    create_room_subscription,
    read_room_subscription,
    decide_room_subscription,
    terminate_room_subscription,
    read_room_queue,
]
