"""`/v1/status`: at a glance which subscriptions are failing."""

from datetime import datetime
from typing import Annotated, Final

from litestar import get
from litestar.params import QueryParameter
from msgspec import Struct

from rooms.domain.states import Scope, SubscriptionStatus, SubscriptionType
from rooms.domain.target import Target
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.pages import MAX_LIMIT
from rooms.rest.problems import documented
from rooms.storage.failures import Failing, failing
from rooms.storage.transactions import transaction

_READ: Final = needs(Scope.OPERATE, Scope.MANAGE)

Most = Annotated[int, QueryParameter(ge=1, le=MAX_LIMIT, description="How many subscriptions are shown at most.")]


class FailingOut(Struct, kw_only=True):
    """A subscription whose deliveries fail: so many were put aside, so many are being tried again (both counted up to
    100,000), since when, and what the newest failure was. `host` is null for PULL.
    """

    subscription_id: str
    name: str
    room_id: int
    room: str
    type: SubscriptionType
    status: SubscriptionStatus
    host: str | None
    failing_since: datetime
    sidelined: int
    oldest_sidelined_at: datetime | None
    retrying: int
    last_status: int | None
    last_error: str | None


class StatusOut(Struct, kw_only=True):
    """The subscriptions that are failing, the longest failing first; `failing_total` counts those beyond the limit too."""

    failing: list[FailingOut]
    failing_total: int


@get("/status", opt=_READ, responses=documented(), tags=["sideline"], summary="Which subscriptions are failing?")
async def read_status(services: Given, principal: Caller, limit: Most = 50) -> StatusOut:
    """Subscriptions with something in their sideline, with retries that wait, or disabled by their endpoint."""
    async with transaction(services.engine) as connection:
        found, total = await failing(connection, principal.organisation_id, limit=limit)
    return StatusOut(failing=[_out(one) for one in found], failing_total=total)


def _out(one: Failing) -> FailingOut:
    same = set(FailingOut.__struct_fields__) - {"host", "type", "status"}
    return FailingOut(
        **{name: getattr(one, name) for name in same},
        type=SubscriptionType(one.type),
        status=SubscriptionStatus(one.status),
        host=None if one.push_url is None else Target.parse(one.push_url).host,
    )


ROUTES: Final = [read_status]
