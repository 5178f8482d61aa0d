"""`/v1/subscriptions/{id}/sideline/schedule`: a sideline that is shoveled by itself."""

from datetime import datetime
from typing import Annotated, Final

from litestar import delete, get, put
from litestar.params import JSONBody
from msgspec import Meta, Struct

from delivery.sideline.order import MAX_CONCURRENCY, MAX_RATE_PER_S, MAX_SHOVELS
from rooms.domain.states import Scope
from rooms.errors import NotFoundError
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.bodies import Body
from rooms.rest.paths import IdPath
from rooms.rest.problems import documented
from rooms.rest.subscriptions import parse_subscription
from rooms.storage import schedules as records
from rooms.storage.subscriptions import find_subscription
from rooms.storage.transactions import transaction

_DAY_S: Final = 86_400
_TAGS: Final = ["sideline"]
_READ: Final = needs(Scope.MANAGE, Scope.OPERATE)
_WRITE: Final = needs(Scope.OPERATE)


class ScheduleNew(Struct, forbid_unknown_fields=True, kw_only=True):
    """How often what rests is brought back, and how."""

    interval_s: Annotated[int, Meta(ge=1, le=30 * _DAY_S, description="From one shovel to the next.")]
    rate_per_s: (
        Annotated[float, Meta(gt=0, le=MAX_RATE_PER_S, description="Deliveries a second; null: as fast as it goes.")]
        | None
    ) = None
    concurrency: Annotated[int, Meta(ge=1, le=MAX_CONCURRENCY, description="Batches under way at a time.")] = 4
    max_shovels: Annotated[
        int, Meta(ge=1, le=10_000, description="What came back so often already stays: poison must not circle.")
    ] = MAX_SHOVELS


class ScheduleOut(ScheduleNew, kw_only=True):
    """The schedule; a sideline that is empty, or is being shoveled, is left in peace at `next_at`."""

    next_at: datetime


@put(
    "/subscriptions/{subscription_id:str}/sideline/schedule",
    dto=Body[ScheduleNew],
    return_dto=None,
    opt=_WRITE,
    responses=documented(),
    tags=_TAGS,
    summary="Shovel a sideline again and again",
)
async def set_schedule(
    data: JSONBody[ScheduleNew], services: Given, principal: Caller, subscription_id: IdPath
) -> ScheduleOut:
    """The schedule, in place of the one there was; the first shovel comes when the interval is over."""
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        await find_subscription(connection, principal.organisation_id, identity)
        found = await records.set_schedule(
            connection,
            identity,
            interval_s=data.interval_s,
            rate_per_s=data.rate_per_s,
            concurrency=data.concurrency,
            max_shovels=data.max_shovels,
        )
    return _out(found)


@get(
    "/subscriptions/{subscription_id:str}/sideline/schedule",
    opt=_READ,
    responses=documented(),
    tags=_TAGS,
    summary="Read a sideline's schedule",
)
async def read_schedule(services: Given, principal: Caller, subscription_id: IdPath) -> ScheduleOut:
    """404 where nobody but people shovels it."""
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        await find_subscription(connection, principal.organisation_id, identity)
        found = await records.find_schedule(connection, identity)
    if found is None:
        raise NotFoundError(f"the sideline of {identity} has no schedule")
    return _out(found)


@delete(
    "/subscriptions/{subscription_id:str}/sideline/schedule",
    status_code=204,
    opt=_WRITE,
    responses=documented(),
    tags=_TAGS,
    summary="Shovel a sideline no more by itself",
)
async def end_schedule(services: Given, principal: Caller, subscription_id: IdPath) -> None:
    """204 whether there was one or not. A shovel under way comes to its end."""
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        await find_subscription(connection, principal.organisation_id, identity)
        await records.end_schedule(connection, identity)


def _out(found: records.Schedule) -> ScheduleOut:
    return ScheduleOut(
        interval_s=found.interval_s,
        rate_per_s=found.rate_per_s,
        concurrency=found.concurrency,
        max_shovels=found.max_shovels,
        next_at=found.next_at,
    )


ROUTES: Final = [set_schedule, read_schedule, end_schedule]
