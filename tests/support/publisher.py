"""A furnished database for tests and benches of publishing: an organisation, rooms, event types, subscriptions."""

import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.clock import SystemClock
from rooms.db.connection import open_engine
from rooms.db.notify import Notifier
from rooms.domain.ids import IdGenerator, KeyId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.domain.work_location import POSTGRES_MODE, BrokerMode
from rooms.metrics import Metrics
from rooms.publishing.backpressure import SaturatedEndpoints
from rooms.publishing.publisher import Publisher
from rooms.publishing.routing_cache import RoutingCache
from rooms.publishing.service import make_routing_cache, open_publisher
from rooms.settings import read_settings

IDS = IdGenerator(random.SystemRandom().getrandbits)


def make_id(room: RoomId) -> str:
    return IDS.generate(room, time.time_ns() // 1_000_000)


@dataclass
class House:
    """One organisation in a database, changed by plain SQL as the management API would change it."""

    url: str
    organisation: OrganisationId = field(default_factory=lambda: OrganisationId(str(uuid.uuid4())))

    def __post_init__(self) -> None:
        self.run(
            "INSERT INTO organisations (id, name) VALUES (%s, %s)",
            self.organisation,
            f"organisation {self.organisation}",
        )
        self.principal = Principal(
            key_id=KeyId(str(uuid.uuid4())),
            organisation_id=self.organisation,
            scopes=frozenset({Scope.PUBLISH}),
        )

    def run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """One statement in a transaction of its own; its rows, if it has any."""
        with psycopg.connect(self.url) as connection:
            cursor = connection.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []

    def count(self, table: str) -> int:
        return int(self.run(f"SELECT count(*) FROM {table}")[0][0])

    def room(self, *, expiration_ms: int | None = None) -> RoomId:
        room = RoomId(random.getrandbits(31) or 1)
        self.run(
            "INSERT INTO rooms (id, organisation_id, name, message_expiration_ms, delivery_delay_ms,"
            " delivery_delay_multiplier, delivery_attempts) VALUES (%s, %s, %s, %s, 1000, 2, 5)",
            room, self.organisation, f"room {room}", expiration_ms,
        )  # fmt: skip
        return room

    def bump(self, room: RoomId) -> str:
        """The words that belong to every change of a room, as the management API writes them."""
        return f"UPDATE rooms SET plan_version = plan_version + 1 WHERE id = {int(room)}; "

    def event_type(
        self, room: RoomId, name: str = "order.created", schemas: Sequence[object] = (None,)
    ) -> None:
        identity = make_id(room)
        with psycopg.connect(self.url) as connection:
            connection.execute(self.bump(room))
            connection.execute(
                "INSERT INTO event_types (room_id, id, name, latest_version) VALUES (%s, %s, %s, %s)",
                (room, identity, name, len(schemas)),
            )
            for version, schema in enumerate(schemas, 1):
                connection.execute(
                    "INSERT INTO event_type_versions (room_id, id, event_type_id, version, schema) VALUES (%s, %s, %s, %s, %s)",
                    (
                        room,
                        make_id(room),
                        identity,
                        version,
                        None if schema is None else json.dumps(schema),
                    ),
                )

    def subscription(
        self,
        room: RoomId,
        kind: str = "PUSH",
        *,
        event_types: object = None,
        status: str = "active",
        version: int = 1,
        wanted: str | None = None,
        ordered: bool = False,
    ) -> SubscriptionId:
        identity = SubscriptionId(make_id(room))
        with psycopg.connect(self.url) as connection:
            connection.execute(self.bump(room))
            connection.execute(
                "INSERT INTO subscriptions (room_id, id, name, type, event_types, timeout_ms, status, version, filter, ordered, organisation_id)"
                " SELECT %s, %s, %s, %s, %s, 10000, %s, %s, %s, %s, organisation_id FROM rooms WHERE id = %s",
                (
                    room, identity, identity, kind, None if event_types is None else json.dumps(event_types), status,
                    version, wanted, ordered, room,
                ),
            )  # fmt: skip
        return identity

    def change(self, room: RoomId, statement: str) -> None:
        """A change of the room in one transaction with its new plan version."""
        self.run(self.bump(room) + statement)


@dataclass
class Desk:
    """A publisher over a database, with its parts within reach."""

    publisher: Publisher
    engine: AsyncEngine
    planner: RoutingCache
    metrics: Metrics
    signals: Notifier
    crowd: SaturatedEndpoints


@asynccontextmanager
async def open_desk(
    url: str, *, shape: BrokerMode = POSTGRES_MODE, **settings: str
) -> AsyncIterator[Desk]:
    """A publisher as one API process has it."""
    read = read_settings(settings)
    if shape.is_relayed:
        read = replace(read, broker_url="memory://", broker_lookahead_s=shape.lookahead_ms // 1000)
    async with AsyncExitStack() as stack:
        engine = open_engine(url, size=4)
        stack.push_async_callback(engine.dispose)
        signals = await stack.enter_async_context(Notifier(url, broker_mode=shape))
        planner, metrics, crowd = (
            make_routing_cache(engine),
            Metrics(),
            SaturatedEndpoints(SystemClock().monotonic),
        )
        publisher = await stack.enter_async_context(
            open_publisher(
                url,
                engine=engine,
                signals=signals,
                ids=IDS,
                clock=SystemClock(),
                metrics=metrics,
                settings=read,
                routing=planner,
                saturated=crowd,
            )
        )
        yield Desk(publisher, engine, planner, metrics, signals, crowd)
