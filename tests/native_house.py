"""An installation on Artemis whose native queues are read by clients that know nothing of Rooms."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge

from rooms.brokers import open_broker
from rooms.domain.copy import Copy
from rooms.domain.ids import SubscriptionId
from rooms.domain.names import destination
from rooms.domain.states import State, SubscriptionType
from rooms.metrics import Metrics
from rooms.ports import Broker, Gate
from rooms.storage.shovels import Shoveled, Shovels
from rooms.storage.sidelines import Sidelines
from rooms.storage.writer import Writer
from rooms.upkeep.dead_letters import NativeDeadLetters
from rooms.upkeep.gates import GatesOfNatives
from tests.installation import Installation, installed, until
from tests.natively import reader
from tests.relaying import RELAYED

PULL = SubscriptionType.PULL


def value_of(metric: Counter | Gauge) -> float:
    """Return what a metric without labels stands at."""
    return float(metric._value.get())


@dataclass
class House:
    installation: Installation
    broker: Broker
    gate: Gate
    writer: Writer
    url: str
    metrics: Metrics

    async def subscribe(self, password: str = "secret") -> SubscriptionId:
        return await self.installation.subscribe(PULL, native_password=self.gate.hashed(password))

    async def keep(self) -> None:
        """One look of upkeep."""
        await GatesOfNatives(self.writer, self.gate).run(lambda: True)

    async def look_for_dead_letters(self) -> None:
        """Run the duty of upkeep once."""
        await NativeDeadLetters(self.writer, self.gate, self.metrics.dead_lettered).run(lambda: True)

    async def sidelined(self, *copies: Copy) -> None:
        """Run upkeep until the deliveries of these are sidelined: the broker counts what it moves a moment later."""

        async def look() -> bool:
            await self.look_for_dead_letters()
            return {await self.installation.state(copy) for copy in copies} == {State.SIDELINED}

        await until(look, "everything to be sidelined")

    async def shovel(self, *copies: Copy) -> None:
        """Queue sidelined deliveries again."""
        found, _ = await Sidelines(self.writer).unloaded(limit=1000)
        wanted = {copy.delivery_id for copy in copies}
        steps = [one.step for one in found if one.step.delivery_id in wanted]
        assert await Shovels(self.writer).shovel(steps, most=5) == [(Shoveled.QUEUED, PULL)] * len(copies)

    def counted(self, outcome: str) -> float:
        """How many dead letters had this outcome."""
        return value_of(self.metrics.native_dead_letters.labels(outcome))

    async def ended(self, *copies: Copy) -> None:
        async def look() -> bool:
            return {await self.installation.state(copy) for copy in copies} == {State.HANDED_OVER}

        await until(look, "everything to be handed over")

    async def read(self, subscription: SubscriptionId, count: int, password: str = "secret") -> list[dict[str, Any]]:
        """Headers of so many messages, their bodies among them as `body`, and nothing comes after them."""
        place = destination(self.installation.room, subscription)

        def take() -> list[dict[str, Any]]:
            with reader(self.url, self.gate.user(subscription), password) as client:
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
        Writer(database, kind="chores", shape=RELAYED) as writer,
    ):
        assert broker.gate is not None
        yield House(installation, broker, broker.gate, writer, artemis_url, Metrics())
