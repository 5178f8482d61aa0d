"""Messages of a day long over, in every state, with the work rows and the log that belong to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import create_engine

from rooms.clock import SystemClock
from rooms.db.retention.partitions import ensure_partitions
from rooms.domain.ids import DeliveryId, MessageId, SubscriptionId, room_of
from rooms.domain.state_machine import State
from tests.support.installation import Installation
from tests.support.sqlalchemy_urls import sqlalchemy_url

DAY: Final = datetime(2020, 3, 10, 12, tzinfo=UTC)
NOW: Final = datetime(2020, 5, 1, tzinfo=UTC)
"""As far from DAY as retention is from what it goes through, whatever day the tests run on."""
PAYLOAD: Final = b'{"old": true}'
UNFINISHED_WORK: Final = {
    State.QUEUED: "outbox",
    State.SCHEDULED: "outbox",
    State.HELD: "held",
    State.LEASED: "leases",
}


class At(SystemClock):
    """Provide a clock with a fixed time, whose monotonic seconds go on."""

    def __init__(self, now: datetime = NOW) -> None:
        self._now = now

    def now(self) -> datetime:
        return self._now

    def now_ms(self) -> int:
        return int(self._now.timestamp() * 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Old:
    """A message of the past with one delivery."""

    message: MessageId
    delivery: DeliveryId
    subscription: SubscriptionId

    @property
    def room(self) -> int:
        return room_of(self.message)


def make_days(url: str, *days: datetime) -> None:
    """The partitions of these days."""
    engine = create_engine(sqlalchemy_url(url))
    try:
        with engine.begin() as connection:
            for day in days:
                ensure_partitions(connection, day, 0)
    finally:
        engine.dispose()


async def write(
    installation: Installation,
    subscription: SubscriptionId,
    state: State,
    *,
    born: datetime = DAY,
    changed: datetime | None = None,
    caller_id: str | None = None,
    payload: bytes = PAYLOAD,
) -> Old:
    """A message born then with one delivery, which came into this state a second later or when it `changed`."""
    at_ms, room = int(born.timestamp() * 1000), room_of(subscription)
    message, delivery = (installation.ids.generate(room, at_ms) for _ in range(2))
    old = Old(message=MessageId(message), delivery=DeliveryId(delivery), subscription=subscription)
    changed = changed or born + timedelta(seconds=1)
    await installation.rows(
        "INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, published_at, correlation_id, payload,"
        " caller_id) VALUES (%s, %s, 'order.created', 1, 4, 1, %s, 'c', %s, %s)",
        room, message, born, payload, caller_id,
    )  # fmt: skip
    if caller_id is not None:
        await installation.rows(
            "INSERT INTO message_ids (room_id, caller_id, message_id, content_hash, answer) VALUES (%s, %s, %s, '', '')",
            room, caller_id, message,
        )  # fmt: skip
    await installation.rows(
        "INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, updated_at) VALUES (%s, %s, %s, %s, %s, %s)",
        room, delivery, message, subscription, state, changed,
    )  # fmt: skip
    for number, (kind, of) in enumerate(
        (("published", None), ("enqueued", delivery), (f"became {state}", delivery))
    ):
        await log(installation, old, number, kind, of=of, at=born)
    await _work(installation, old, state, born)
    return old


async def log(
    installation: Installation,
    old: Old,
    number: int,
    kind: str,
    *,
    of: str | None = None,
    at: datetime = DAY,
) -> None:
    """A row of the log about a message."""
    await installation.rows(
        "INSERT INTO log_entries (room_id, message_id, writer_id, writer_seq, kind, delivery_id, ts)"
        " VALUES (%s, %s, 900, %s, %s, %s, %s)",
        old.room, old.message, number, kind, of, at,
    )  # fmt: skip


async def _work(installation: Installation, old: Old, state: State, born: datetime) -> None:
    where = (old.room, old.delivery, old.subscription)
    match UNFINISHED_WORK.get(state):
        case "outbox":
            await installation.rows(
                "INSERT INTO outbox (room_id, id, subscription_id, message_id, kind, priority, generation, attempt, due_at)"
                " VALUES (%s, %s, %s, %s, 0, 4, 0, 0, %s)",
                *where, old.message, born,
            )  # fmt: skip
        case "held":
            await installation.rows(
                "INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason) VALUES (%s, %s, %s, 4, 0, 'paused')",
                *where,
            )
        case "leases":
            await installation.rows(
                "INSERT INTO leases (room_id, id, subscription_id, generation, until) VALUES (%s, %s, %s, 0, %s)",
                *where, born,
            )  # fmt: skip
    if state is State.SIDELINED:
        await installation.rows(
            "INSERT INTO sidelined (room_id, id, subscription_id, generation, since, reason)"
            " VALUES (%s, %s, %s, 0, %s, 'attempts_exhausted')",
            *where, born,
        )  # fmt: skip


async def found(installation: Installation, old: Old) -> dict[str, Any]:
    """Return the data of a message: its payload, its delivery's state, the kinds of its log."""
    payload = await installation.rows(
        "SELECT payload FROM messages WHERE room_id = %s AND id = %s", old.room, old.message
    )
    state = await installation.rows(
        "SELECT state::text FROM deliveries WHERE room_id = %s AND id = %s", old.room, old.delivery
    )
    journey = await installation.rows(
        "SELECT kind FROM delivery_log WHERE room_id = %s AND message_id = %s ORDER BY ts, writer_id, writer_seq",
        old.room, old.message,
    )  # fmt: skip
    return {
        "payload": [bytes(row["payload"]) for row in payload],
        "states": [row["state"] for row in state],
        "log": [row["kind"] for row in journey],
    }


def whole(state: State, *more: str) -> dict[str, Any]:
    """Return the expected `found` of a message that lost nothing."""
    return {
        "payload": [PAYLOAD],
        "states": [state],
        "log": ["published", "enqueued", f"became {state}", *more],
    }


GONE: Final[dict[str, Any]] = {"payload": [], "states": [], "log": []}


async def partitions(installation: Installation, table: str = "deliveries") -> Sequence[str]:
    """The names of a table's partitions before today's, in their order."""
    rows = await installation.rows(
        "SELECT inhrelid::regclass::text AS name FROM pg_inherits WHERE inhparent = %s::regclass"
        " AND inhrelid::regclass::text ~ (%s || '_20[12][0-5]') ORDER BY 1",
        table, table,
    )  # fmt: skip
    return [row["name"] for row in rows]


async def left_over(installation: Installation) -> list[str]:
    """Return the tables and functions of a replacement in progress."""
    rows = await installation.rows(
        "SELECT relname::text AS name FROM pg_class WHERE relkind = 'r' AND NOT relispartition AND relname ~ '_(kept|gone)'"
        " UNION ALL SELECT proname::text FROM pg_proc WHERE proname ~ '_mirror$'"
    )
    return [row["name"] for row in rows]
