"""Bound what one page of a list reads for a subscriber in another organisation's room.

Deliveries that it may not know of yet are skipped one by one, and a schedule or a suspension leaves
any number of them. So its page ends after a number of rows, although it may not be full, and the
next page goes on there. What was published since a suspension began is not read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Select,
    case,
    cast,
    func,
    literal,
    select,
    text,
    true,
)
from sqlalchemy import Uuid as UuidType
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.queries.messages import ListFilter
from rooms.db.tables.messages import deliveries
from rooms.db.tables.rooms import subscriptions
from rooms.domain.state_machine import SubscriptionStatus

T = TypeVar("T")

MAX_SCANNED: Final = 10_000
"""The most deliveries that are looked at for a page, besides those of the page."""
MIN_SCANNED: Final = 1_000
"""The share of this of each subscription, where a list is about many."""
_CLOCK_OFFSET_MS: Final = 60_000
"""The most by which the clock that times ids may be before PostgreSQL's, which times the rest."""
# Before PostgreSQL 18, the cost of a sort that is off would have the statement compiled.
_SET_SORT: Final = text(
    "SELECT set_config('enable_sort', :sort, true), set_config('jit', 'off', true)"
)
_Uuid: Final = UuidType(as_uuid=False)
_LAST: Final = "ffffffff-ffff-ffff-ffff-ffffffffffff"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned(Generic[T]):
    """Hold a page, and the position at which the list goes on if it is not full (None: nowhere)."""

    found: Sequence[T]
    further: str | None = None


def hidden_from() -> ColumnElement[str]:
    """Return the id from which on a row of `subscriptions` has no deliveries that are known.

    Ids begin with their milliseconds.
    """
    since_ms = func.ceil(func.extract("epoch", subscriptions.c.status_since) * 1000)
    digits = func.lpad(func.to_hex(cast(since_ms + _CLOCK_OFFSET_MS, BigInteger)), 12, "0")
    first = cast(digits.op("||")(literal("0" * 20)), _Uuid)
    is_suspended = subscriptions.c.status == SubscriptionStatus.SUSPENDED.value
    return case((is_suspended, first), else_=cast(literal(_LAST), _Uuid))


async def find_scan_bound(
    connection: AsyncConnection,
    chosen: Select[Any],
    wanted: ListFilter,
    *,
    before: str | None,
    limit: int,
    max_scanned: int = MAX_SCANNED,
) -> str | None:
    """Return the least id that the page before `before` reads; None: it reads to the end.

    `chosen`: selects the ids of subscriptions in another organisation's room.
    """
    each = chosen.add_columns(hidden_from().label("hidden_from")).cte("each")
    counted = each.alias("counted")
    share = func.greatest(
        max_scanned / func.greatest(func.count(), 1), min(MIN_SCANNED, max_scanned)
    )
    # It varies, or a subscriber that publishes too could schedule messages up to one row before the
    # bound, and see by the next cursor whether one more is hidden from it.
    depth = select(cast(limit + share * (1 + func.random()) / 2, BigInteger)).select_from(counted)
    bounds = [*wanted.id_bounds(deliveries.c.id), deliveries.c.id < each.c.hidden_from]
    if before is not None:
        bounds.append(deliveries.c.id < before)
    # Only the columns of its index: room_id would suggest the primary key, and the whole room.
    last = (
        select(deliveries.c.id)
        .where(deliveries.c.subscription_id == each.c.id, *bounds)
        .order_by(deliveries.c.id.desc())
        .offset(depth.scalar_subquery())
        .limit(1)
        .correlate(each)
        .lateral("last")
    )
    statement = select(last.c.id).select_from(each.join(last, true())).order_by(last.c.id.desc())
    # Where others have few deliveries the planner expects few of each, and would sort all of them.
    await connection.execute(_SET_SORT, {"sort": "off"})
    found: str | None = await connection.scalar(statement.limit(1))
    await connection.execute(_SET_SORT, {"sort": "on"})
    return found
