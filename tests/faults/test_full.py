"""The full shape on one machine: its servers are killed one by one, its keeper too, and it is started and stopped twice."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest
from kazoo.client import KazooClient

from rooms.embedded import FetchError, MissingError, processes
from rooms.embedded.claim import holder
from rooms.embedded.running import free_port
from rooms.embedded.services import Services
from tests.servers import unavailable
from tests.service import START_S, STOP_S, Service, descendants, environment_of, running
from tests.talk import Talk, make_queue
from tests.waiting import until

SERVERS: Final = ("postgres", "artemis", "zookeeper")
ROOM: Final = {"name": "kept", "delivery_delay_ms": 500, "delivery_delay_multiplier": 2, "delivery_attempts": 5}
QUEUE: Final = {"destination": r"kept\c\ckept"}


@pytest.fixture(scope="module", autouse=True)
def fetched() -> None:
    try:
        Services(data=Path()).fetch()
    except (MissingError, FetchError) as missing:
        unavailable(str(missing))


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    """Servers that nobody has started; whoever keeps them in the end is ended."""
    services = Services(data=tmp_path / "rooms")
    yield services
    if (keeper := holder(services.folder)) is not None:
        processes.end(keeper, (signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S))


def rooms(services: Services, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rooms", *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=environment_of(services.data, free_port()),
        timeout=START_S,
    )


def state_after(services: Services, verb: str) -> str:
    done = rooms(services, "full", verb, "--json")
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["state"])


def pid(services: Services, name: str) -> int | None:
    """The number of a server; None while there is none."""
    seen = processes.recorded(services.folder / "run" / f"{name}.pid")
    return seen.pid if seen is not None and processes.started(seen.pid) == seen.started else None


@contextmanager
def zookeeper(services: Services) -> Iterator[KazooClient]:
    client = KazooClient(urlsplit(services.addresses()["ELECTION_URL"]).netloc)
    client.start(timeout=START_S)
    try:
        yield client
    finally:
        client.stop()
        client.close()


def kill(services: Services, name: str) -> None:
    """`kill -9` a server, and wait until another is in its place and serves."""
    killed = until(lambda: pid(services, name), f"{name} to run")
    os.kill(killed, signal.SIGKILL)
    assert processes.wait_gone(killed, STOP_S)
    until(lambda: pid(services, name) not in {None, killed}, f"{name} to be started again")
    until(services.answer, f"{name} to serve", within_s=START_S)


def listed(service: Service) -> list[dict[str, str]] | None:
    """The rooms; None while the database is away."""
    answer = service.call("GET", "/rooms")
    return list(answer.json()["items"]) if answer.is_success else None


def test_each_killed_server_of_run_full_is_back_with_its_data(tmp_path: Path) -> None:
    """After each kill the server has what it had: a room, a message in a queue, a node. Then Ctrl-C leaves nothing running."""
    with running(tmp_path, command=("full", "run")) as service:
        services = Services(data=service.data)
        made = service.http.post("/v1/rooms", json=ROOM)
        assert made.status_code == 201, made.text
        broker = services.addresses()["BROKER_URL"]
        with closing(Talk(broker)) as talk:
            make_queue(talk, "kept", "kept")
            send = {**QUEUE, "destination-type": "ANYCAST", "persistent": "true", "receipt": "sent"}
            assert talk.ask("SEND", send, "still here").startswith("RECEIPT")
        with zookeeper(services) as client:
            client.create("/kept", b"still here")

        for name in SERVERS:
            kill(services, name)

        assert [room["name"] for room in until(lambda: listed(service), "the list of rooms")] == ["kept"]
        with closing(Talk(broker)) as talk:
            assert talk.ask("SUBSCRIBE", {**QUEUE, "id": "1", "subscription-type": "ANYCAST"}).endswith("still here")
        with zookeeper(services) as client:
            assert client.get("/kept")[0] == b"still here"

        keeper = service.kill("servers")
        service.await_another("servers", keeper)
        until(services.answer, "the servers of the second keeper", within_s=START_S)
        assert [room["name"] for room in until(lambda: listed(service), "the list of rooms")] == ["kept"]
        refused = rooms(services, "full", "down")
        assert refused.returncode == 1
        assert "make run-full" in refused.stderr
        family = descendants(service.process.pid)
        assert {pid(services, name) for name in SERVERS} <= set(family)


def test_commands_in_a_second_terminal_beside_run_full(tmp_path: Path) -> None:
    """With no address in their environment they work with Artemis and ZooKeeper, whose password is in full.env. While Artemis
    stands still the doctor says so, with the log to look at, and repairs nothing.
    """
    with running(tmp_path, command=("full", "run")) as service:
        services = Services(data=service.data)
        agreed = rooms(services, "doctor")
        assert (agreed.returncode, agreed.stdout) == (0, "row, broker and magazine agree\n"), agreed.stderr

        artemis = until(lambda: pid(services, "artemis"), "Artemis to run")
        os.kill(artemis, signal.SIGSTOP)
        try:
            for options in ((), ("--repair",)):
                done = rooms(services, "doctor", "--json", *options)
                report = json.loads(done.stdout)
                (finding,) = report["findings"]
                assert (done.returncode, finding["part"], finding["away"]) == (1, "broker", True)
                assert report["repair_refused"] is bool(options)
                assert str(services.folder / "log" / "artemis.log") in finding["advice"]
        finally:
            os.kill(artemis, signal.SIGCONT)
        until(lambda: rooms(services, "doctor").returncode == 0, "Artemis to answer again")
    left = rooms(services, "doctor")
    assert left.returncode == 1
    assert "no database" in left.stderr


def test_up_twice_a_killed_keeper_and_down_twice(services: Services) -> None:
    """A second call finds the first one's work, changes nothing and succeeds; what a killed keeper left is cleared."""
    assert state_after(services, "up") == "started"
    first, addresses = pids(services), services.addresses()
    assert services.answer()
    assert state_after(services, "up") == "running already"
    assert pids(services) == first

    keeper = holder(services.folder)
    assert keeper is not None
    os.kill(keeper, signal.SIGKILL)
    assert processes.wait_gone(keeper, STOP_S)
    assert state_after(services, "up") == "started"
    second = pids(services)
    assert not first & second
    assert services.addresses() == addresses

    assert state_after(services, "down") == "stopped"
    assert not any(processes.started(number) for number in first | second)
    assert not services.answer()
    assert state_after(services, "down") == "not running"


def pids(services: Services) -> set[int]:
    """The numbers of all three servers."""
    found = {number for name in SERVERS if (number := pid(services, name)) is not None}
    assert len(found) == len(SERVERS)
    return found
