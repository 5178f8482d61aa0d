"""Serve the schedule of a sideline: it shovels the sideline of a subscription at an interval."""

from typing import Annotated, Final

from litestar import delete, get, put
from litestar.params import JSONBody
from msgspec import Meta, Struct

from delivery.sideline.shovel import MAX_SHOVELS
from rooms.api.auth import OF_SUBSCRIPTIONS, Caller, ServicesDep, for_portals, require_scopes
from rooms.api.changes import ChangeDep
from rooms.api.codec import Body
from rooms.api.params import IdPath
from rooms.api.sideline import ShovelConcurrency, ShovelLimit, ShovelRate
from rooms.api.subscriptions import parse_subscription
from rooms.db.catalog import shovel_schedules as records
from rooms.db.catalog.subscriptions import find_subscription
from rooms.db.connection import transaction
from rooms.domain.state_machine import Scope
from rooms.errors import NotFoundError

_TAGS: Final = ["sideline"]
_WRITE: Final = for_portals(require_scopes(Scope.OPERATE, allows=OF_SUBSCRIPTIONS))
_DAY_S: Final = 86_400
_READ: Final = for_portals(require_scopes(Scope.MANAGE, Scope.OPERATE, allows=OF_SUBSCRIPTIONS))


class SetShovelSchedule(Struct, forbid_unknown_fields=True, kw_only=True):
    """Set how often a sideline is shoveled, and how."""

    interval_s: Annotated[
        int, Meta(ge=1, le=30 * _DAY_S, description="Seconds from one shovel to the next.")
    ]
    rate_per_s: ShovelRate | None = None
    concurrency: ShovelConcurrency = 4
    max_shovels: ShovelLimit = MAX_SHOVELS


@put(
    "/subscriptions/{subscription_id:str}/sideline/schedule",
    dto=Body[SetShovelSchedule],
    return_dto=None,
    opt=_WRITE,
    tags=_TAGS,
    summary="Schedule shovels of a sideline",
)
async def set_schedule(
    data: JSONBody[SetShovelSchedule],
    principal: Caller,
    change: ChangeDep,
    subscription_id: IdPath,
) -> records.SidelineSchedule:
    """Set the schedule, or replace it; the first shovel runs after one interval."""
    identity = parse_subscription(subscription_id)
    async with change.transaction() as connection:
        subscription = await find_subscription(connection, principal, identity)
        return await records.set_schedule(
            connection,
            subscription,
            interval_s=data.interval_s,
            rate_per_s=data.rate_per_s,
            concurrency=data.concurrency,
            max_shovels=data.max_shovels,
        )


@get(
    "/subscriptions/{subscription_id:str}/sideline/schedule",
    opt=_READ,
    tags=_TAGS,
    summary="Read a sideline's schedule",
)
async def read_schedule(
    services: ServicesDep, principal: Caller, subscription_id: IdPath
) -> records.SidelineSchedule:
    """Return the schedule. 404: the sideline has none."""
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        await find_subscription(connection, principal, identity)
        found = await records.find_schedule(connection, identity)
    if found is None:
        raise NotFoundError(f"the sideline of {identity} has no schedule")
    return found


@delete(
    "/subscriptions/{subscription_id:str}/sideline/schedule",
    status_code=204,
    opt=_WRITE,
    tags=_TAGS,
    summary="Delete a sideline's schedule",
)
async def end_schedule(principal: Caller, change: ChangeDep, subscription_id: IdPath) -> None:
    """Delete the schedule, if there is one. A running shovel completes."""
    identity = parse_subscription(subscription_id)
    async with change.transaction() as connection:
        await find_subscription(connection, principal, identity)
        await records.delete_schedule(connection, identity)


ROUTES: Final = [set_schedule, read_schedule, end_schedule]
