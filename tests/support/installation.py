"""A furnished database for tests of what happens after publish: rooms, subscriptions, and deliveries at any step."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from psycopg.abc import Buffer
from psycopg.rows import dict_row
from psycopg.types.datetime import TimestamptzLoader

from rooms.db.connection import Connection, connect
from rooms.db.queue.endpoints import EndpointRecord, load_endpoints
from rooms.db.secrets import Cipher
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import (
    DeliveryId,
    IdGenerator,
    MessageId,
    OrganisationId,
    RoomId,
    SubscriptionId,
    room_of,
)
from rooms.domain.state_machine import State, SubscriptionType
from rooms.domain.work_location import POSTGRES_MODE, BrokerMode

PATIENCE_S: Final = 60.0
CLAIM_S: Final = 600.0
"""Longer than any test waits: another process gets a claim only because its holder died."""
ROOM: Final = RoomId(7)
SECRET: Final = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
SEAL: Final = Cipher(bytes(32))
PAYLOAD: Final = b'{"a": 1}\x00\xff'

_T = TypeVar("_T")


async def until(
    look: Callable[[], Awaitable[_T]], what: str, *, within_s: float = PATIENCE_S
) -> _T:
    """Return the result of `look` as soon as it is true: for states in PostgreSQL, which send no signal."""
    deadline = time.monotonic() + within_s
    while not (found := await look()):
        assert time.monotonic() < deadline, (
            f"waited {within_s:g} s in vain for {what}; last seen: {found!r}"
        )
        await asyncio.sleep(0.01)
    return found


class EndlessTimes(TimestamptzLoader):
    """Reads `-infinity`, which Python has no time for, as the first there is."""

    def load(self, data: Buffer) -> datetime:
        return (
            datetime.min.replace(tzinfo=UTC) if bytes(data) == b"-infinity" else super().load(data)
        )


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def ago(seconds: float = 1.0) -> datetime:
    """A time so long ago: what is due then is due."""
    return datetime.now(UTC) - timedelta(seconds=seconds)


PUBLISHER: Final = "01900000-0000-7000-8000-0000000000aa"
"""The key of the room's owner that publishes."""


def host_of(subscription: SubscriptionId) -> str:
    """The host of a subscription's endpoint."""
    return f"{subscription}.test"


@dataclass
class Installation:
    """One organisation with one room, changed by plain SQL.

    What it publishes has rows but no work yet.
    """

    url: str
    connection: Connection
    organisation: OrganisationId
    room: RoomId = ROOM
    ids: IdGenerator = field(default_factory=lambda: IdGenerator(random.getrandbits))
    shape: BrokerMode = POSTGRES_MODE
    """Where the work goes that it queues."""

    async def rows(self, statement: str, *values: Any) -> list[dict[str, Any]]:
        async with self.connection.cursor(row_factory=dict_row) as cursor:
            await cursor.execute(statement, values or None)
            return await cursor.fetchall() if cursor.description else []

    async def value(self, statement: str, *values: Any) -> Any:
        """The one value that the statement gives."""
        (row,) = await self.rows(statement, *values)
        (found,) = row.values()
        return found

    async def make_room(self, room: RoomId, **columns: Any) -> RoomId:
        fields = {
            "id": room,
            "organisation_id": self.organisation,
            "name": f"room-{room}",
            "delivery_delay_ms": 50,
            "delivery_delay_multiplier": 2.0,
            "delivery_attempts": 3,
        }
        await self._insert("rooms", fields | columns)
        return room

    async def subscribe(
        self,
        kind: SubscriptionType = SubscriptionType.PUSH,
        *,
        room: RoomId | None = None,
        **columns: Any,
    ) -> SubscriptionId:
        """A new subscription; `columns` are the table's."""
        room = self.room if room is None else room
        identity = SubscriptionId(self.ids.generate(room, now_ms()))
        push = kind is SubscriptionType.PUSH
        fields = {
            "room_id": room,
            "organisation_id": self.organisation,
            "id": identity,
            "name": f"subscription-{identity}",
            "type": kind,
            "push_url": f"http://{host_of(identity)}/hook" if push else None,
            "timeout_ms": 30_000,
            "secret": SEAL.encrypt(SECRET.encode()) if push else None,
        }
        await self._insert("subscriptions", fields | columns)
        return identity

    async def endpoint_record(self, subscription: SubscriptionId) -> EndpointRecord:
        """Return the settings of a PUSH subscription as a worker loads them."""
        pairs = [(room_of(subscription), subscription)]
        return (await load_endpoints(self.connection, pairs))[subscription]

    async def change(self, subscription: SubscriptionId, **columns: Any) -> None:
        """Other settings, as the API makes them: with the next version."""
        assignments = "".join(f"{name} = %s, " for name in columns)
        await self.rows(
            f"UPDATE subscriptions SET {assignments} version = version + 1, updated_at = now() WHERE room_id = %s AND id = %s",
            *columns.values(), room_of(subscription), subscription,
        )  # fmt: skip

    async def publish(
        self,
        *subscriptions: SubscriptionId,
        payload: bytes = PAYLOAD,
        headers: Mapping[str, str] | None = None,
        priority: int = 4,
        lifetime_s: float | None = None,
        kind: SubscriptionType = SubscriptionType.PUSH,
        state: State = State.QUEUED,
        generation: int = 0,
        attempt: int = 0,
        delay_ms: int = 0,
        correlation_id: str | None = None,
        event_type: str = "order.created",
    ) -> list[DeliveryTask]:
        """One message, a delivery for each subscription in `state`, and the copies that stand for them."""
        room, at_ms = room_of(subscriptions[0]), now_ms()
        message = MessageId(self.ids.generate(room, at_ms))
        expires = (
            None if lifetime_s is None else datetime.fromtimestamp(at_ms / 1000 + lifetime_s, UTC)
        )
        encoded = None if headers is None else json.dumps(headers).encode()
        await self._insert(
            "messages",
            {
                "room_id": room,
                "id": message,
                "event_type": event_type,
                "event_version": 3,
                "priority": priority,
                "fanout": len(subscriptions),
                "correlation_id": correlation_id or message,
                "expires_at": expires,
                "publisher_id": PUBLISHER,
                "headers": encoded,
                "payload": payload,
            },
        )
        copies = []
        for subscription in subscriptions:
            copy = DeliveryTask(
                room_id=room,
                delivery_id=DeliveryId(self.ids.generate(room, at_ms)),
                message_id=message,
                subscription_id=subscription,
                kind=kind,
                generation=generation,
                attempt=attempt,
                delay_ms=delay_ms,
                priority=priority,
                event_type=event_type,
                event_version=3,
                correlation_id=correlation_id or message,
                published_ms=at_ms,
                expires_ms=None if expires is None else round(expires.timestamp() * 1000),
                subscription_version=1,
                deadline=float("inf"),
                headers=encoded,
                payload=payload,
            )
            await self._insert(
                "deliveries",
                {
                    "room_id": room,
                    "id": copy.delivery_id,
                    "message_id": message,
                    "subscription_id": subscription,
                    "state": state,
                    "generation": generation,
                    "attempt": attempt,
                    "expires_at": expires,
                },
            )
            copies.append(copy)
        return copies

    async def queue(
        self, *copies: DeliveryTask, due: datetime | None = None, shape: BrokerMode | None = None
    ) -> None:
        """The work rows of copies, as a publish makes them."""
        shape = shape or self.shape
        for copy in copies:
            await self._insert(
                "outbox",
                {
                    "room_id": copy.room_id,
                    "id": copy.delivery_id,
                    "message_id": copy.message_id,
                    "subscription_id": copy.subscription_id,
                    "kind": int(shape.push if copy.kind is SubscriptionType.PUSH else shape.pull),
                    "priority": copy.priority,
                    "generation": copy.generation,
                    "attempt": copy.attempt,
                    "delay_ms": copy.delay_ms,
                    "due_at": due or ago(),
                    "expires_at": None
                    if copy.expires_ms is None
                    else datetime.fromtimestamp(copy.expires_ms / 1000, UTC),
                },
            )

    async def publish_many(
        self, subscription: SubscriptionId, count: int, *, due: datetime | None = None
    ) -> None:
        """`count` messages with their queued deliveries and work, in one statement."""
        at_ms = now_ms()
        room = room_of(subscription)
        messages = [self.ids.generate(room, at_ms) for _ in range(count)]
        deliveries = [self.ids.generate(room, at_ms) for _ in range(count)]
        await self.rows(
            f"""
            WITH v AS MATERIALIZED (SELECT * FROM unnest(%s::uuid[], %s::uuid[]) AS v (message, id)),
            m AS (
                INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, publisher_id, correlation_id, payload)
                SELECT %s, message, 'order.created', 3, 4, 1, '{PUBLISHER}', message::text, '\\x7b7d' FROM v
            ), d AS (
                INSERT INTO deliveries (room_id, id, message_id, subscription_id, state)
                SELECT %s, id, message, %s, 'queued' FROM v
            )
            INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at)
            SELECT %s, id, message, %s, %s, 4, 0, 0, %s FROM v
            """,
            messages, deliveries, room, room, subscription, room, subscription, int(self.shape.push), due or ago(),
        )  # fmt: skip

    async def delivery(self, copy: DeliveryTask) -> dict[str, Any]:
        """The row of a delivery."""
        (row,) = await self.rows(
            "SELECT * FROM deliveries WHERE room_id = %s AND id = %s",
            copy.room_id,
            copy.delivery_id,
        )
        return row

    async def state(self, copy: DeliveryTask) -> State:
        return State((await self.delivery(copy))["state"])

    async def states(self) -> dict[str, int]:
        """Count the deliveries by state."""
        found = await self.rows("SELECT state::text, count(*) AS n FROM deliveries GROUP BY state")
        return {row["state"]: row["n"] for row in found}

    async def work(self, table: str, copy: DeliveryTask) -> dict[str, Any] | None:
        """The row of a delivery in `outbox` or `held`."""
        found = await self.rows(
            f"SELECT * FROM {table} WHERE room_id = %s AND id = %s", copy.room_id, copy.delivery_id
        )
        return found[0] if found else None

    async def journey(self, copy: DeliveryTask) -> list[dict[str, Any]]:
        """The log of a delivery in the order of its writing."""
        return await self.rows(
            "SELECT * FROM delivery_log WHERE room_id = %s AND message_id = %s AND delivery_id = %s"
            " ORDER BY ts, writer_id, writer_seq",
            copy.room_id, copy.message_id, copy.delivery_id,
        )  # fmt: skip

    async def kinds(self, copy: DeliveryTask) -> list[str]:
        return [row["kind"] for row in await self.journey(copy)]

    async def terminate(self, name: str) -> int:
        """End the sessions of this application name, as a crash of their process would; how many there were."""
        found = await self.rows(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE application_name = %s"
            " AND datname = current_database()",
            name,
        )  # fmt: skip
        return len(found)

    async def gone(self, name: str) -> None:
        """Wait until the sessions of this application name have ended: the server does that after their client has left."""

        async def look() -> bool:
            return not await self.backends(name)

        await until(look, f"the sessions of {name} to end")

    async def backends(self, name: str) -> Sequence[int]:
        """The process ids of the sessions of this application name."""
        found = await self.rows(
            "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND datname = current_database() ORDER BY 1",
            name,
        )  # fmt: skip
        return [row["pid"] for row in found]

    async def _insert(self, table: str, fields: Mapping[str, Any]) -> None:
        marks = ", ".join(["%s"] * len(fields))
        await self.rows(
            f"INSERT INTO {table} ({', '.join(fields)}) VALUES ({marks})", *fields.values()
        )


@asynccontextmanager
async def installed(url: str, shape: BrokerMode = POSTGRES_MODE) -> AsyncIterator[Installation]:
    """An installation in a migrated database; one that is there already is only entered."""
    connection = await connect(url, name="test")
    connection.adapters.register_loader("timestamptz", EndlessTimes)
    try:
        ids = IdGenerator(random.getrandbits)
        installation = Installation(
            url, connection, OrganisationId(ids.generate_global(now_ms())), ids=ids, shape=shape
        )
        if not await installation.value("SELECT count(*) FROM organisations"):
            organisation = installation.organisation
            await installation.rows(
                "INSERT INTO organisations (id, name) VALUES (%s, 'ours')", organisation
            )
            await installation.make_room(installation.room)
        yield installation
    finally:
        await connection.close()


async def other_organisation(
    installation: Installation, *subscriptions: SubscriptionId, name: str = "other"
) -> None:
    """Give subscriptions to a new organisation."""
    other = await installation.value(
        "INSERT INTO organisations (id, name) VALUES (gen_random_uuid(), %s) RETURNING id::text",
        name,
    )
    await installation.rows(
        "UPDATE subscriptions SET organisation_id = %s WHERE id = ANY (%s::uuid[])",
        other,
        list(subscriptions),
    )
