"""Create the jobs that end what waits for one subscription: clear, and skip to now."""

from typing import Annotated, Any, Final

from litestar import Response, post
from litestar.params import QueryParameter

from rooms.api.auth import OF_SUBSCRIPTIONS, Caller, ServicesDep, require_scopes
from rooms.api.changes import Change, ChangeDep
from rooms.api.deps import ApiServices
from rooms.api.jobs import JobAccepted, accepted_response
from rooms.api.params import IdPath
from rooms.api.subscriptions import parse_subscription
from rooms.db.catalog.subscriptions import find_subscription
from rooms.db.jobs.requests import request_job
from rooms.domain.job import JobKind
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import FieldProblem, InvalidError

_TAGS: Final = ["subscriptions"]
_WRITE: Final = require_scopes(Scope.OPERATE, allows=OF_SUBSCRIPTIONS)
Confirm = Annotated[
    str | None,
    QueryParameter(description="The subscription's name, to prevent this by mistake."),
]


@post(
    "/subscriptions/{subscription_id:str}/clear",
    status_code=202,
    opt=_WRITE,
    tags=_TAGS,
    summary="Cancel unfinished deliveries of a subscription",
)
async def clear_subscription(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    subscription_id: IdPath,
    confirm: Confirm = None,
) -> Response[JobAccepted]:
    """Start the job that cancels all unfinished deliveries, also those that are due later.

    For the subscriber. Leases end, and a later ack of one is answered as for an expired lease; a
    running attempt of a webhook ends first. Messages published after this call and sidelined
    deliveries are kept.
    """
    return await _create(
        services,
        principal,
        change,
        subscription_id,
        kind=JobKind.CLEAR_SUBSCRIPTION,
        confirm=confirm,
    )


@post(
    "/subscriptions/{subscription_id:str}/skip-to-now",
    status_code=202,
    opt=_WRITE,
    tags=_TAGS,
    summary="Skip the backlog of a subscription",
)
async def skip_to_now(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    subscription_id: IdPath,
    confirm: Confirm = None,
) -> Response[JobAccepted]:
    """Start the job that cancels what was published before this call, and was due by then.

    For the subscriber. Messages published after this call are delivered, and so are earlier ones
    that are due after it. Sidelined deliveries stay sidelined, and block their ordering keys no
    longer. Leases and running attempts are treated as by a clear.
    """
    return await _create(
        services, principal, change, subscription_id, kind=JobKind.SKIP_TO_NOW, confirm=confirm
    )


async def _create(
    services: ApiServices,
    principal: Principal,
    change: Change,
    subscription_id: str,
    *,
    kind: JobKind,
    confirm: str | None,
) -> Response[Any]:
    identity = parse_subscription(subscription_id)
    async with change.transaction() as connection:
        found = await find_subscription(connection, principal, identity)
        if confirm != found.name:
            raise InvalidError(
                FieldProblem(
                    "confirm",
                    "repeat the subscription's name here: deliveries that wait are cancelled",
                )
            )
        job = await request_job(
            connection,
            principal.organisation_id,
            kind,
            new_id=services.ids.generate_global(services.clock.now_ms()),
            room=found.room_id,
            arguments={
                "room_id": found.room_id,
                "subscription_id": identity,
                "name": found.name,
            },
        )
    return accepted_response(job)


ROUTES: Final = [clear_subscription, skip_to_now]
