"""Test `rooms full` on one machine: killed servers, a killed supervisor, repeated commands."""

import json
import os
import re
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

from rooms.local import FetchError, MissingError, process_table
from rooms.local.pidfile import lock_owner
from rooms.local.services import LocalServices, free_port
from tests.support.polling import until
from tests.support.raw_stomp import Talk, make_queue
from tests.support.servers import unavailable
from tests.support.service import START_S, STOP_S, Service, descendants, environment_of, running

SERVERS: Final = ("postgres", "artemis", "zookeeper")
ROOM: Final = {
    "name": "kept",
    "delivery_delay_ms": 500,
    "delivery_delay_multiplier": 2,
    "delivery_attempts": 5,
}
QUEUE: Final = {"destination": r"kept\c\ckept"}


@pytest.fixture(scope="module", autouse=True)
def fetched() -> None:
    try:
        LocalServices(data=Path()).fetch()
    except (MissingError, FetchError) as missing:
        unavailable(str(missing))


@pytest.fixture(scope="module")
def service(fetched: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Run the whole service on Artemis and ZooKeeper, as in a first terminal."""
    with running(tmp_path_factory.mktemp("full"), command=("full", "run")) as service:
        yield service


@pytest.fixture
def services(tmp_path: Path) -> Iterator[LocalServices]:
    """Return servers that are not started. Stop whatever runs them in the end."""
    services = LocalServices(data=tmp_path / "rooms")
    yield services
    if (keeper := lock_owner(services.folder)) is not None:
        process_table.terminate(keeper, (signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S))


def rooms(services: LocalServices, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rooms", *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=environment_of(services.data, free_port()),
        timeout=START_S,
    )


def state_after(services: LocalServices, verb: str) -> str:
    done = rooms(services, "full", verb, "--json")
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["state"])


def pid(services: LocalServices, name: str) -> int | None:
    """Return the process id of a server, or None if it does not run."""
    seen = process_table.read_pid_file(services.folder / "run" / f"{name}.pid")
    return (
        seen.pid
        if seen is not None and process_table.start_token(seen.pid) == seen.started
        else None
    )


@contextmanager
def zookeeper(services: LocalServices) -> Iterator[KazooClient]:
    client = KazooClient(urlsplit(services.addresses()["ELECTION_URL"]).netloc)
    client.start(timeout=START_S)
    try:
        yield client
    finally:
        client.stop()
        client.close()


def kill(services: LocalServices, name: str) -> None:
    """Kill a server by SIGKILL, and wait until its successor is ready."""
    killed = until(lambda: pid(services, name), f"{name} to run")
    os.kill(killed, signal.SIGKILL)
    assert process_table.wait_gone(killed, STOP_S)
    until(lambda: pid(services, name) not in {None, killed}, f"{name} to be started again")
    until(services.is_ready, f"{name} to serve", within_s=START_S)


def listed(service: Service) -> list[dict[str, str]] | None:
    """Return the rooms, or None while the database is unreachable."""
    answer = service.call("GET", "/rooms")
    return list(answer.json()["items"]) if answer.is_success else None


def test_commands_in_a_second_terminal_beside_run_full(service: Service) -> None:
    """Commands without addresses use Artemis and ZooKeeper, with the password in full.env.

    While Artemis is suspended, the doctor reports it with its log, and repairs nothing. Then the
    broker's figures are exported, which a task of its own measures.
    """
    services = LocalServices(data=service.data)
    agreed = rooms(services, "doctor")
    agreement = (0, "database, broker and magazines agree\n")
    assert (agreed.returncode, agreed.stdout) == agreement, agreed.stderr

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

    def exported() -> bool:
        text = service.http.get("/metrics").text
        used = re.search(r"^rooms_broker_disk_usage_ratio (\S+)$", text, re.MULTILINE)
        return (
            used is not None
            and 0 < float(used[1]) < 1
            and re.search(r"^rooms_native_queue_depth 0.0$", text, re.MULTILINE) is not None
            and 'rooms_processes_alive{kind="relay"} 1.0' in text
        )

    until(exported, "the metrics of broker and relay, on which alerts are raised")


def test_killed_servers_restart_with_their_data(service: Service) -> None:
    """Each server keeps its data after a kill: a room, a message in a queue, a node.

    Ctrl-C then leaves no process, and the doctor no database. So this is the last test of `service`.
    """
    services = LocalServices(data=service.data)
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

    assert [room["name"] for room in until(lambda: listed(service), "the list of rooms")] == [
        "kept"
    ]
    with closing(Talk(broker)) as talk:
        assert talk.ask("SUBSCRIBE", {**QUEUE, "id": "1", "subscription-type": "ANYCAST"}).endswith(
            "still here"
        )
    with zookeeper(services) as client:
        assert client.get("/kept")[0] == b"still here"

    keeper = service.kill("servers")
    service.await_another("servers", keeper)
    until(services.is_ready, "the servers of the second keeper", within_s=START_S)
    assert [room["name"] for room in until(lambda: listed(service), "the list of rooms")] == [
        "kept"
    ]
    refused = rooms(services, "full", "down")
    assert refused.returncode == 1
    assert "make run-full" in refused.stderr
    family = descendants(service.process.pid)
    assert {pid(services, name) for name in SERVERS} <= set(family)
    service.stop()
    left = rooms(services, "doctor")
    assert left.returncode == 1
    assert "no database" in left.stderr


def test_up_and_down_are_idempotent_after_a_killed_supervisor(services: LocalServices) -> None:
    """A second `up` changes nothing and succeeds; what a killed supervisor left is removed."""
    assert state_after(services, "up") == "started"
    first, addresses = pids(services), services.addresses()
    assert services.is_ready()
    assert state_after(services, "up") == "running already"
    assert pids(services) == first

    keeper = lock_owner(services.folder)
    assert keeper is not None
    os.kill(keeper, signal.SIGKILL)
    assert process_table.wait_gone(keeper, STOP_S)
    assert state_after(services, "up") == "started"
    second = pids(services)
    assert not first & second
    assert services.addresses() == addresses

    assert state_after(services, "down") == "stopped"
    assert not any(process_table.start_token(number) for number in first | second)
    assert not services.is_ready()
    assert state_after(services, "down") == "not running"


def pids(services: LocalServices) -> set[int]:
    """Return the process ids of all three servers."""
    found = {number for name in SERVERS if (number := pid(services, name)) is not None}
    assert len(found) == len(SERVERS)
    return found
