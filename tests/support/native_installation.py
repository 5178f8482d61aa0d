"""An installation on Artemis whose native queues are read by clients that know nothing of Rooms."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge

from delivery.brokers import open_broker
from delivery.maintenance.broker_users import sync_broker_users
from delivery.maintenance.native_queues import DeadLetterReader
from rooms.db.sideline.entries import SidelineEntries
from rooms.db.sideline.shovel import MoveResult, ShovelOutcome, ShovelQueries
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId
from rooms.domain.room import destination_name
from rooms.domain.state_machine import State, SubscriptionType
from rooms.metrics import Metrics
from rooms.ports import Broker, BrokerUsers
from tests.support.installation import Installation, installed, until
from tests.support.native_client import reader
from tests.support.relay import RELAYED

PULL = SubscriptionType.PULL


def value_of(metric: Counter | Gauge) -> float:
    """Return the value of a metric without labels."""
    return float(metric._value.get())


@dataclass
class House:
    installation: Installation
    broker: Broker
    gate: BrokerUsers
    writer: LogWriter
    url: str
    metrics: Metrics

    async def subscribe(self, password: str = "secret") -> SubscriptionId:
        return await self.installation.subscribe(
            PULL, native_password=self.gate.hash_password(password)
        )

    async def keep(self) -> None:
        """One look of upkeep."""
        await sync_broker_users(self.writer, self.gate, lambda: True)

    async def look_for_dead_letters(self) -> None:
        """Run the duty of upkeep once."""
        await DeadLetterReader(self.writer, self.gate, self.metrics.count_native_dead_letters).run(
            lambda: True
        )

    async def sidelined(self, *copies: DeliveryTask) -> None:
        """Run upkeep until the deliveries of these are sidelined: the broker counts what it moves a moment later."""

        async def look() -> bool:
            await self.look_for_dead_letters()
            return {await self.installation.state(copy) for copy in copies} == {State.SIDELINED}

        await until(look, "everything to be sidelined")

    async def shovel(self, *copies: DeliveryTask) -> None:
        """Queue sidelined deliveries again."""
        sidelines = SidelineEntries(self.writer)
        waiting = [one.subscription for one in await sidelines.list_unloaded_sidelines(None)]
        found = (await sidelines.list_unloaded(waiting, limit=1000)).entries
        wanted = {copy.delivery_id for copy in copies}
        steps = [one.ref for one in found if one.ref.delivery_id in wanted]
        assert await ShovelQueries(self.writer).shovel(steps, max_shovels=5) == [
            MoveResult(ShovelOutcome.QUEUED, PULL)
        ] * len(copies)

    def counted(self, outcome: str) -> float:
        """Count the dead letters with this outcome."""
        return value_of(self.metrics.native_dead_letters.labels(outcome))

    async def ended(self, *copies: DeliveryTask) -> None:
        async def look() -> bool:
            return {await self.installation.state(copy) for copy in copies} == {State.HANDED_OVER}

        await until(look, "everything to be handed over")

    async def read(
        self, subscription: SubscriptionId, count: int, password: str = "secret"
    ) -> list[dict[str, Any]]:
        """Headers of so many messages, their bodies among them as `body`, and nothing comes after them."""
        place = destination_name(self.installation.room, subscription)

        def take() -> list[dict[str, Any]]:
            with reader(self.url, self.gate.user_name(subscription), password) as client:
                client.read(place)
                found = [client.next() for _ in range(count)]
                assert client.nothing_more()
                return [{**frame.headers, "body": frame.body} for frame in found]

        return await asyncio.to_thread(take)


@asynccontextmanager
async def native_house(database: str, artemis_url: str) -> AsyncIterator[House]:
    """An installation of its own, on a broker that others may share."""
    client = f"native-{secrets.token_hex(6)}"
    async with (
        installed(database) as installation,
        open_broker(artemis_url, claim_s=60, farm="rooms", client=client) as broker,
        LogWriter(database, kind="chores", broker_mode=RELAYED) as writer,
    ):
        assert broker.users is not None
        yield House(installation, broker, broker.users, writer, artemis_url, Metrics())
