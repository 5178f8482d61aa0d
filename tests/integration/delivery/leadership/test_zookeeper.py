"""ZooKeeper's election only: paths, contents, refreshes, session timeouts and access."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError

from delivery.leadership.epochs import EPOCHS_PER_MS
from delivery.leadership.zookeeper import ZooKeeperElection
from delivery.leadership.zookeeper_session import NodeChange, ZooKeeperSession
from rooms.backend_urls import parse_zookeeper_url
from rooms.clock import SystemClock
from rooms.errors import ElectionUnavailableError
from tests.support.election_members import PARTITIONS, until
from tests.support.local_servers import TestServer


@pytest.fixture
def client() -> str:
    return f"test-{time.time_ns()}"


@pytest.fixture
async def raw(zookeeper_url: str) -> AsyncIterator[Any]:
    """Return kazoo's client, to read nodes from outside."""
    client = KazooClient(zookeeper_url.removeprefix("zookeeper://"))
    await asyncio.to_thread(client.start)
    yield client
    await asyncio.to_thread(client.stop)
    client.close()


def election(
    url: str, client: str, member: str, parameters: str = "session_s=20&refresh_s=1"
) -> ZooKeeperElection:
    return ZooKeeperElection(
        parse_zookeeper_url(f"{url}?{parameters}"),
        client=client,
        member=member,
        clock=SystemClock(),
    )


async def test_paths_and_contents_of_nodes(zookeeper_url: str, client: str, raw: Any) -> None:
    base = f"/{client}-ignis-workers/{client}"

    def reported() -> Any:
        return json.loads(raw.get(f"{base}/communicator/one")[0])

    async with election(zookeeper_url, client, "one") as one, one.join(PARTITIONS) as membership:

        async def all_held() -> bool:
            return all(membership.epoch(partition) for partition in PARTITIONS)

        await until(all_held, "everything to be held")
        assert sorted(raw.get_children(base)) == [
            "communicator",
            "loadbalancer-leader",
            "members",
            "partitions",
        ]
        assert raw.get_children(f"{base}/members") == ["one"]
        (contender,) = raw.get_children(f"{base}/loadbalancer-leader")
        name, leading = raw.get(f"{base}/loadbalancer-leader/{contender}")
        assert (name, leading.ephemeralOwner) == (
            b"one",
            raw.exists(f"{base}/members/one").ephemeralOwner,
        )
        assert reported() == {
            "balancerId": "one",
            "epoch": leading.czxid,
            "partitions": list(PARTITIONS),
        }
        epochs = {partition: membership.epoch(partition) or 0 for partition in PARTITIONS}
        assert len(set(epochs.values())) == len(PARTITIONS)
        assert max(epochs.values()) == int(raw.get(f"{base}/partitions")[0])
        for partition in PARTITIONS:
            hold = raw.exists(f"{base}/partitions/{partition.replace('/', '%2F')}")
            assert abs(epochs[partition] // EPOCHS_PER_MS - hold.ctime) < 60_000
            assert hold.czxid > leading.czxid
            assert hold.ephemeralOwner == leading.ephemeralOwner

        # The leader writes the assignment again; until then the member obeys the wrong one.
        async def given_up(**wrong: Any) -> bool:
            """Return whether it holds nothing; a refresh may interfere, so write again."""
            if not any(membership.epoch(partition) for partition in PARTITIONS):
                return True
            raw.set(f"{base}/communicator/one", json.dumps({**reported(), **wrong}).encode())
            return False

        await until(lambda: given_up(balancerId="another"), "a member to heed that it is not meant")
        await until(all_held, "the assignment to be refreshed")
        await until(lambda: given_up(epoch=1), "a member to refuse an older epoch")
        await until(all_held, "the assignment to be refreshed")
    assert raw.get_children(f"{base}/members") == raw.get_children(f"{base}/partitions") == []


def test_assignments_are_written_every_half_minute() -> None:
    """Check the default of the URL."""
    assert parse_zookeeper_url("zookeeper://one:2181,two:2181").refresh_s == 30


async def test_the_session_timeout_is_the_negotiated_one(zookeeper_url: str) -> None:
    """Ask for more than the server allows: the member uses what was agreed."""
    for asked_s, agreed_s in ((100.0, 60.0), (5.0, 5.0), (0.2, 1.0)):
        address = replace(parse_zookeeper_url(zookeeper_url), session_s=asked_s)
        session = ZooKeeperSession(address)
        session.start()
        await session.wait_connected(60)
        if agreed_s > 1:  # or it may be over before it is used
            assert await session.read("/nowhere") is None

        async def reported(session: ZooKeeperSession = session, agreed_s: float = agreed_s) -> bool:
            return session.timeout_s == pytest.approx(agreed_s, rel=0.01)

        await until(reported, f"{agreed_s:g} s to be believed in where {asked_s:g} were asked for")
        await session.close()


async def test_nodes_need_the_password(zookeeper_url: str, client: str, raw: Any) -> None:
    host = zookeeper_url.removeprefix("zookeeper://")
    mine = f"zookeeper://me:a%40b@{host}/{client}"
    async with election(mine, client, "one") as one, one.join(["p"]) as membership:

        async def held() -> bool:
            return membership.epoch("p") is not None

        await until(held, "the partition to be held")
        assert (await one.view()).leader == "one"
        with pytest.raises(NoAuthError):
            raw.get(f"/{client}/{client}-ignis-workers/{client}/members/one")
        async with election(f"{zookeeper_url}/{client}", client, "two") as stranger:
            with pytest.raises(ElectionUnavailableError):
                await stranger.view()


async def test_a_change_of_an_ended_session_is_refused(
    zookeeper_url: str, client: str, raw: Any
) -> None:
    """Let kazoo open a new session by itself: it must not apply a change of the old one."""
    session = ZooKeeperSession(parse_zookeeper_url(f"{zookeeper_url}?session_s=20"))
    session.start()
    await session.wait_connected(60)
    await session.ensure_node(f"/{client}")
    proof = await session.create(f"/{client}/proof", b"")
    hold = await session.create(f"/{client}/hold", b"mine")
    assert proof is not None
    assert hold is not None
    raw.delete(f"/{client}/proof")
    with pytest.raises(ElectionUnavailableError):
        await session.apply_changes(
            f"/{client}/proof", [NodeChange(path=f"/{client}/hold", kind="delete")]
        )
    assert raw.get(f"/{client}/hold")[0] == b"mine"
    await session.close()
    assert raw.exists(f"/{client}/hold") is None


@pytest.mark.blocking
async def test_an_event_loop_that_hangs_loses_its_session(
    zookeeper_url: str, client: str, raw: Any
) -> None:
    """Block the loop: kazoo's thread would keep the session alive and hold everything for ever."""
    gone = threading.Event()

    def hang() -> None:
        assert raw.exists(f"/{client}/hold", watch=lambda _: gone.set()) is not None
        assert gone.wait(60), "the hold outlives the loop"

    session = ZooKeeperSession(
        parse_zookeeper_url(f"{zookeeper_url}?session_s=1"), keep_alive_by_requests=True
    )
    session.start()
    await session.wait_connected(60)
    await session.ensure_node(f"/{client}")
    assert await session.create(f"/{client}/hold", b"mine") is not None
    hang()
    await session.wait_over()
    await session.close()


async def test_members_rejoin_a_zookeeper_that_lost_its_data(
    zookeeper_server: Callable[[], TestServer], client: str
) -> None:
    """Erase the data: members join again without a restart, under later epochs, and the view has them."""
    server = await asyncio.to_thread(zookeeper_server)
    parameters = "session_s=2&refresh_s=1"
    async with (
        election(server.url, client, "one", parameters) as one,
        one.join(PARTITIONS) as membership,
        election(server.url, client, "api", parameters) as api,
    ):

        async def all_held() -> bool:
            return all(membership.epoch(partition) for partition in PARTITIONS)

        async def shown() -> bool:
            with contextlib.suppress(ElectionUnavailableError):
                view = await api.view()
                return view.leader == "one" and [
                    len(member.partitions) for member in view.members
                ] == [len(PARTITIONS)]
            return False

        await until(all_held, "everything to be held")
        await until(shown, "the view to show it")
        before = {partition: membership.epoch(partition) or 0 for partition in PARTITIONS}
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.erase)
        assert not await shown()
        await asyncio.to_thread(server.start)
        await until(all_held, "everything to be held again")
        assert all(
            (membership.epoch(partition) or 0) > before[partition] for partition in PARTITIONS
        )
        await until(shown, "the view to show it again")


async def test_epochs_grow_although_the_clock_was_set_back(
    zookeeper_url: str, client: str, raw: Any
) -> None:
    """Let the last hold be of next year by the clock of that time."""
    later = (time.time_ns() // 1_000_000 + 365 * 86_400_000) * EPOCHS_PER_MS
    partitions = f"/{client}-ignis-workers/{client}/partitions"
    raw.create(partitions, str(later).encode(), makepath=True)
    async with election(zookeeper_url, client, "one") as one, one.join(["p"]) as membership:

        async def held() -> bool:
            return membership.epoch("p") is not None

        await until(held, "the partition to be held")
        assert membership.epoch("p") == later + 1


async def test_members_that_take_holds_at_once_get_different_epochs(
    zookeeper_url: str, client: str
) -> None:
    """Let 8 sessions create ten nodes each: each number is given once."""
    sessions = [ZooKeeperSession(parse_zookeeper_url(zookeeper_url)) for _ in range(8)]
    for session in sessions:
        session.start()
        await session.wait_connected(60)
    await sessions[0].ensure_node(f"/{client}/numbers")

    async def create(at: int, number: int) -> int | None:
        return await sessions[at].create_numbered(
            f"/{client}/{at}-{number}",
            b"",
            counter=f"/{client}/numbers",
            next_number=lambda last: last + 1,
        )

    found = await asyncio.gather(*(create(at, number) for at in range(8) for number in range(10)))
    assert sorted(number or 0 for number in found) == list(range(1, 81))
    assert await create(0, 0) is None
    assert await create(0, 10) == 81
    for session in sessions:
        await session.close()
