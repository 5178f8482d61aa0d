"""Serve `/v1/sidelines`: every subscription with failed deliveries."""

from datetime import datetime
from typing import Annotated, Final

from litestar import get
from msgspec import Meta, Struct

from rooms.api.auth import OF_SUBSCRIPTIONS, Caller, ServicesDep, for_portals, require_scopes
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.db.connection import transaction
from rooms.db.sideline.overview import SidelineOverview, list_sidelines
from rooms.domain.state_machine import Scope, SubscriptionStatus, SubscriptionType

_LIST: Final = "sidelines"


class SidelineSummary(Struct, kw_only=True):
    """Describe the sideline of one subscription, and its newest error.

    `schedule_interval_s`: seconds between shovels, null where none is scheduled.
    """

    subscription_id: str
    name: str
    type: SubscriptionType
    status: SubscriptionStatus
    room_id: int
    room: str
    sidelined: Annotated[int, Meta(description="Counted up to 10,000.")]
    by_reason: dict[str, int]
    oldest_at: datetime
    newest_at: datetime
    last_status: int | None
    last_error: str | None
    schedule_interval_s: int | None
    schedule_next_at: datetime | None


class SidelineSummaryPage(Struct, kw_only=True):
    """List sidelines that are not empty, of the newest subscription first."""

    items: list[SidelineSummary]
    next_cursor: str | None


@get(
    "/sidelines",
    opt=for_portals(
        require_scopes(Scope.MANAGE, Scope.OPERATE, Scope.SUBSCRIBE, allows=OF_SUBSCRIPTIONS)
    ),
    tags=["sideline"],
    summary="List sidelines that are not empty",
)
async def list_all_sidelines(
    services: ServicesDep, principal: Caller, limit: Limit = 50, cursor: Cursor = None
) -> SidelineSummaryPage:
    """List the organisation's subscriptions with sidelined deliveries.

    A call looks at 5,000 subscriptions at most, so a page may have few items or none while
    `next_cursor` is set: the list goes on there.
    """
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    async with transaction(services.engine) as connection:
        scan = await list_sidelines(
            connection, principal, before=page.after, limit=page.fetch_limit
        )
    return page.respond(
        SidelineSummaryPage,
        scan.found,
        _to_summary,
        position=lambda one: one.subscription_id,
        further=scan.further,
    )


def _to_summary(found: SidelineOverview) -> SidelineSummary:
    same = {
        name: getattr(found, name)
        for name in SidelineSummary.__struct_fields__
        if name not in {"sidelined", "by_reason"}
    }
    return SidelineSummary(
        **same, sidelined=sum(found.by_reason.values()), by_reason=dict(found.by_reason)
    )


ROUTES: Final = [list_all_sidelines]
