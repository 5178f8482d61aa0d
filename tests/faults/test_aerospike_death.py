"""An Aerospike that is killed, after its clients have dropped the node and answer by themselves.

Oracle: every answer without a node is `unavailable`; an acknowledged load is stored where a firer
or a sweeper reaches it; nothing is reported as empty, missing or done.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from delivery.magazines import open_magazines
from delivery.magazines.kv_magazines import AsyncKvMagazine
from rooms.domain.handler_queue import ShovelSettings
from rooms.domain.magazine import Entry, HandlerQueueRecord, Slot, main_magazine_name, sideline_name
from rooms.errors import MagazineMissingError, MagazineUnavailableError
from rooms.ports import Magazine, Magazines
from tests.conftest import administer, at
from tests.faults.test_sidelines import terminal_of
from tests.support.aerospike_server import REASON, AerospikeServer, asd
from tests.support.handler_queues import NAME, Desk, desk
from tests.support.magazines import entries
from tests.support.polling import until
from tests.support.process_group import Crew, assembled

HASTY = "?retries=2&sleep_ms=1&socket_timeout_ms=500&total_timeout_ms=500"
CLIENT = "death"


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[AerospikeServer]:
    """Yield a node that keeps what it flushed before a kill."""
    binary = asd()
    if binary is None:
        pytest.skip(REASON)
    server = AerospikeServer(binary, tmp_path / "aerospike", on_disk=True)
    with ExitStack() as stack:
        stack.callback(server.stop)
        server.start()
        yield server


def client_of(magazine: Magazine) -> Any:
    assert isinstance(magazine, AsyncKvMagazine)
    store: Any = magazine._magazine.store
    return store._client.raw


def await_dropped(magazine: Magazine) -> None:
    client = client_of(magazine)
    until(lambda: not client.get_node_names(), "the client to drop the dead node")


def everything(
    magazines: Magazines, magazine: Magazine, home: Slot
) -> list[Callable[[], Awaitable[object]]]:
    queue = HandlerQueueRecord(
        name="orders", handler_type="x.Y", created_at=datetime.now(UTC), shards=1
    )
    return [
        lambda: magazine.load(entries("b")),
        lambda: magazine.fire(1),
        lambda: magazine.take([home]),
        lambda: magazine.take([home], older_than_s=0),
        lambda: magazine.find([home]),
        lambda: magazine.peek(1),
        lambda: magazine.delete([home]),
        lambda: magazine.sweep(0, epoch=1, older_than_s=0),
        magazine.state,
        magazine.count,
        magazines.check,
        lambda: magazines.open(main_magazine_name("orders")),
        lambda: magazines.create(main_magazine_name("orders"), shards=1),
        lambda: magazines.create(sideline_name("orders"), shards=1),
        lambda: magazines.drop(main_magazine_name("orders")),
        lambda: magazines.save_queue_record(queue),
        magazines.list_queue_records,
        lambda: magazines.list_queue_records(active=False),
        lambda: magazines.delete_queue_record("orders"),
    ]


async def test_every_call_without_a_node_raises_unavailable(
    aerospike_server: AerospikeServer,
) -> None:
    async with open_magazines(
        aerospike_server.url + HASTY, farm="farm", client=CLIENT
    ) as magazines:
        magazine = await magazines.create(main_magazine_name("orders"), shards=1)
        (home,) = await magazine.load(entries("a"))
        (taken,) = await magazine.fire(1)
        await magazines.list_queue_records()
        aerospike_server.kill()
        await asyncio.to_thread(await_dropped, magazine)
        for call in everything(magazines, magazine, home):
            with pytest.raises(MagazineUnavailableError):
                await call()
        with pytest.raises(MagazineUnavailableError):
            await magazine.reload([taken])


async def test_acknowledged_loads_survive_the_death_of_a_node(
    on_disk: AerospikeServer,
) -> None:
    """Load while the node dies and comes back: every acknowledged entry is handed out."""
    async with open_magazines(on_disk.url + HASTY, farm="farm", client=CLIENT) as magazines:
        magazine = await magazines.create(main_magazine_name("orders"), shards=2)
        await asyncio.to_thread(on_disk.restart)
        answered: set[str] = set()
        refused = 0
        phase = "before"

        async def loads() -> None:
            nonlocal refused
            number = 0
            while phase != "over":
                number += 1
                identity, of = f"{number}", phase
                try:
                    await magazine.load(entries(identity))
                except MagazineUnavailableError:
                    refused += 1
                else:
                    assert of != "dead", "there was no node"
                    if of == "back":
                        answered.add(identity)

        loading = asyncio.create_task(loads())
        await asyncio.to_thread(on_disk.kill)
        phase = "dead"
        await asyncio.to_thread(await_dropped, magazine)
        before = refused
        await asyncio.to_thread(until, lambda: refused > before + 100, "loads without a node")
        phase = "starting"
        await asyncio.to_thread(on_disk.start)
        phase = "back"
        await asyncio.to_thread(
            until, lambda: len(answered) > 100, "loads of the node that is back"
        )
        phase = "over"
        await loading
        fired: set[str] = set()
        while found := await magazine.fire(1000):
            fired |= {one.entry.id for one in found}
        assert answered <= fired
        assert await magazine.count() >= len(answered)


class DiesOnce:
    """A store whose server dies, is dropped and restarts empty, before the first call of `create`."""

    def __init__(self, real: Any, server: AerospikeServer, again: Callable[[], None]) -> None:
        self._real = real
        self._server = server
        self._again = again
        self._died = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create(self, *given: Any) -> Any:
        if not self._died:
            self._died = True
            self._server.kill()
            until(
                lambda: not self._real._client.raw.get_node_names(),
                "the client to drop the dead node",
            )
            assert {str(outcome) for outcome in self._real.create(*given)} == {"doubt"}
            self._server.start()
            until(self._real._client.raw.get_node_names, "the client to find the node again")
            self._again()
        return self._real.create(*given)


@pytest.mark.parametrize("made_again", [False, True])
async def test_a_load_forgotten_by_a_restarted_server_is_not_acknowledged(
    aerospike_server: AerospikeServer, *, made_again: bool
) -> None:
    """Claim slots from a server that dies, and write them on one that does not know them."""
    url = (
        aerospike_server.url + "?retries=60&sleep_ms=100&socket_timeout_ms=500&total_timeout_ms=500"
    )
    async with (
        open_magazines(url, farm="farm", client=CLIENT) as magazines,
        open_magazines(url, farm="farm", client=CLIENT) as others,
    ):
        magazine = await magazines.create(main_magazine_name("orders"), shards=1)
        assert isinstance(magazine, AsyncKvMagazine)
        loop = asyncio.get_running_loop()

        def again() -> None:
            if made_again:
                asyncio.run_coroutine_threadsafe(
                    others.create(main_magazine_name("orders"), shards=1, first_pointer=10**12),
                    loop,
                ).result()

        shelf: Any = magazine._magazine
        shelf.store = DiesOnce(shelf.store, aerospike_server, again)
        with pytest.raises(MagazineUnavailableError if made_again else MagazineMissingError):
            await magazine.load(entries("a"))
        if made_again:
            await magazine.load(entries("a"))
            assert [one.entry.id for one in await magazine.fire(10)] == ["a"]


@pytest.fixture
def crew(
    postgres_url: str,
    template: str,
    database_numbers: Iterator[int],
    tmp_path: Path,
    aerospike_server: AerospikeServer,
) -> Iterator[Crew]:
    name = f"crew_{os.getpid()}_{next(database_numbers)}"
    administer(postgres_url, "CREATE DATABASE {} TEMPLATE {}", name, template)
    settings = {"MAGAZINE_URL": aerospike_server.url + HASTY}
    with assembled(tmp_path, at(postgres_url, name), environment=settings) as (crew, _):
        yield crew
    administer(postgres_url, "DROP DATABASE {} WITH (FORCE)", name)


def test_a_handler_queue_answers_503_while_there_is_no_node(
    crew: Crew, aerospike_server: AerospikeServer, tmp_path: Path
) -> None:
    terminal = terminal_of(crew, tmp_path)
    crew.post("/queues", {"name": NAME, "shards": 2})
    path = f"/v1/queues/{NAME}/messages"

    def sent() -> int:
        return crew.http.post(path, json={"payload": 1}).status_code

    assert sent() == 202
    assert terminal.json("magazine", "list")["items"][0]["depth"] == 1
    aerospike_server.kill_until_dropped()
    # Each process drops the node at its own time: continue well beyond that of the API.
    assert {sent() for _ in range(300)} == {503}
    for arguments in (
        ("magazine", "list"),
        ("magazine", "show", NAME),
        ("queue", "sideline", NAME),
    ):
        answer = terminal.run(*arguments)
        assert answer.exit_code != 0
        assert "(503)" in answer.stderr, "neither 0 nor empty"
    aerospike_server.start()
    # Maintenance creates the magazines again; until then loads fail.
    assert sent() == 503
    crew.start("upkeep")
    until(lambda: sent() == 202, "the queue to be made again")


async def every_id(at: Desk) -> set[str]:
    pair, found = await at.pair(), set[str]()
    for magazine in (pair.main, pair.sideline):
        after = None
        while page := await magazine.peek(1000, after=after):
            found |= {one.entry.id for one in page}
            after = page[-1].slot
    return found


MANY = 5000


async def test_a_shovel_continues_after_the_death_of_a_node(
    database: str, on_disk: AerospikeServer
) -> None:
    async with desk(database, on_disk.url) as at:
        queue = await at.queue(shovel=ShovelSettings(one_shot=True, concurrency=2))
        pair = await at.pair()
        for start in range(0, MANY, 1000):
            await pair.sideline.load(
                [Entry(id=f"{n}", body=b"1") for n in range(start, start + 1000)]
            )
        await asyncio.to_thread(on_disk.restart)
        wanted = {f"{n}" for n in range(MANY)}
        assert await every_id(at) == wanted
        shovel = at.shovel(batch=100, retry_s=1.0)
        passes = 0
        killed = False

        def go_on() -> bool:
            nonlocal killed
            if not killed and at.moved("queued") >= MANY // 5:
                killed = True
                on_disk.kill()
            return True

        await shovel.run(go_on)
        assert killed
        client = client_of(pair.sideline)
        await asyncio.to_thread(await_dropped, pair.sideline)
        moved = at.moved("queued")
        for _ in range(5):
            at.clock.ahead_s += 60
            await shovel.run(lambda: True)
        assert at.moved("queued") == moved, "nothing is moved without a node"
        await asyncio.to_thread(on_disk.start)
        await asyncio.to_thread(until, client.get_node_names, "the client to find the node again")
        while (await at.found()).settings.shovel is not None:
            passes += 1
            assert passes < 20
            at.clock.ahead_s += 60
            await shovel.run(lambda: True)
        assert await every_id(at) == wanted
        sweeper = at.sweeper()
        await sweeper.sweep(queue, lambda: True, sideline=True)
        assert await every_id(at) == wanted
