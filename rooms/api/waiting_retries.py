"""Create the jobs that make the waiting retries of one subscription due now."""

from typing import Final

from litestar import Response, post

from rooms.api.auth import OF_SUBSCRIPTIONS, Caller, ServicesDep, for_portals, require_scopes
from rooms.api.changes import ChangeDep
from rooms.api.errors import documented_responses
from rooms.api.jobs import JobAccepted, accepted_response
from rooms.api.params import IdPath
from rooms.api.subscriptions import parse_subscription
from rooms.db.catalog.subscriptions import find_visible_subscription
from rooms.db.jobs.requests import request_job
from rooms.db.queries.throttle import bring_probe_forward
from rooms.domain.job import JobKind
from rooms.domain.state_machine import Scope, SubscriptionStatus
from rooms.errors import ConflictError

_RESUMABLE: Final = frozenset({SubscriptionStatus.PAUSED, SubscriptionStatus.DISABLED})


@post(
    "/subscriptions/{subscription_id:str}/retry",
    status_code=202,
    opt=for_portals(require_scopes(Scope.OPERATE, Scope.MANAGE, allows=OF_SUBSCRIPTIONS)),
    responses=documented_responses(409),
    tags=["subscriptions"],
    summary="Retry now what waits for its next attempt",
)
async def retry_waiting(
    services: ServicesDep, principal: Caller, change: ChangeDep, subscription_id: IdPath
) -> Response[JobAccepted]:
    """Start the job that makes the subscription's waiting retries due now. For both sides.

    They are deliveries that were attempted before this call and are due later. Attempts, expiry and
    order stay. Messages that are due later themselves, held deliveries, and those in flight are
    left alone. If the circuit is open, its next probe is due at once, too. In the job's `result`,
    `retried` counts what it made due. 409: the subscription is not active.
    """
    identity = parse_subscription(subscription_id)
    async with change.transaction() as connection:
        found = await find_visible_subscription(connection, principal, identity)
        if found.status is not SubscriptionStatus.ACTIVE:
            remedy = ": resume it first" if found.status in _RESUMABLE else ""
            raise ConflictError(f"it is {found.status}, and nothing is sent to it{remedy}")
        await bring_probe_forward(connection, found)
        job = await request_job(
            connection,
            principal.organisation_id,
            JobKind.RETRY_WAITING,
            new_id=services.ids.generate_global(services.clock.now_ms()),
            room=found.room_id,
            arguments={
                "room_id": found.room_id,
                "subscription_id": identity,
                "name": found.name,
            },
        )
    return accepted_response(job)


ROUTES: Final = [retry_waiting]
