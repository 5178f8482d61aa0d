"""Run commands beside a running service, with an environment that names none of its stores.

Oracle: a command uses the stores of the service, or is refused with the settings it needs. A
suspended store is named with advice, and nothing is repaired meanwhile. A database that was
restored to an earlier time loses no message that the broker has.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.aerospike_server import AerospikeServer
from tests.support.local_servers import TestServer
from tests.support.polling import until
from tests.support.room import Place
from tests.support.service import START_S, Service, environment_of
from tests.support.service import running as serving
from tests.support.webhook_sink import Sink

AEROSPIKE = "aerospike://127.0.0.1:1/ns"
HEARTBEAT = "?heartbeat_ms=1000&connect_timeout_ms=1000"


def rooms(
    service: Service, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command that knows only the data folder and the port."""
    return subprocess.run(
        [sys.executable, "-m", "rooms", *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**environment_of(service.data, service.port), **environment},
        timeout=START_S,
    )


def away(service: Service, *options: str, **environment: str) -> list[str]:
    """Return the stores that the doctor cannot reach."""
    done = rooms(service, "doctor", "--json", *options, **environment)
    assert done.returncode == 1, done.stderr
    return [finding["part"] for finding in json.loads(done.stdout)["findings"] if finding["away"]]


def findings(service: Service, *options: str, **environment: str) -> list[dict[str, Any]]:
    """Return the findings of the doctor, none of which is a fault."""
    done = rooms(service, "doctor", "--json", *options, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return list(json.loads(done.stdout)["findings"])


@pytest.fixture
def artemis(artemis_server: Callable[..., TestServer]) -> TestServer:
    return artemis_server()


@pytest.fixture
def zookeeper(zookeeper_server: Callable[[], TestServer]) -> TestServer:
    return zookeeper_server()


@pytest.fixture
def full(artemis: TestServer, zookeeper: TestServer, memory: Path) -> Iterator[Service]:
    settings = {
        "BROKER_URL": artemis.url + HEARTBEAT,
        "ELECTION_URL": zookeeper.url,
        "ROOMS_FARM": f"second-{os.getpid()}",
    }
    with serving(memory, settings=settings) as service:
        yield service


def test_commands_beside_artemis_and_zookeeper(
    full: Service, artemis: TestServer, zookeeper: TestServer
) -> None:
    address = f"stomp://***@127.0.0.1:{artemis.url.rpartition(':')[2]}"
    password = artemis.url.partition("@")[0].rpartition(":")[2]

    refused = rooms(full, "doctor")
    assert refused.returncode == 1
    assert "BROKER_URL is not set, and " in refused.stderr
    assert f"set BROKER_URL={address}, with the user, password" in refused.stderr
    assert password not in refused.stderr
    assert "agree" not in refused.stdout
    for command in ("worker", "relay"):
        joined = rooms(full, command)
        assert joined.returncode == 1
        assert address in joined.stderr
    elsewhere = rooms(full, "doctor", "--repair", BROKER_URL=artemis.url, MAGAZINE_URL=AEROSPIKE)
    assert elsewhere.returncode == 1
    assert (
        f"MAGAZINE_URL is {AEROSPIKE} here, and postgresql in the running processes ("
        in elsewhere.stderr
    )
    assert "set MAGAZINE_URL to nothing" in elsewhere.stderr

    given = {"BROKER_URL": artemis.url + HEARTBEAT}
    agreed = rooms(full, "doctor", **given)
    assert (agreed.returncode, agreed.stdout) == (0, "database, broker and magazines agree\n"), (
        agreed.stderr
    )

    artemis.suspend()
    assert away(full, **given) == ["broker"]
    repair = rooms(full, "doctor", "--repair", **given)
    assert repair.returncode == 1
    assert "nothing was repaired: broker does not answer" in repair.stdout
    until(
        lambda: "broker: the broker (BROKER_URL) does not answer" in rooms(full, "status").stderr,
        "the status to say so",
    )
    artemis.resume()

    zookeeper.suspend()
    cluster = rooms(full, "cluster")
    assert cluster.returncode == 1
    assert (
        "the store of the election (ELECTION_URL, else PostgreSQL) does not answer"
        in cluster.stderr
    )
    assert away(full, **given) == ["election"]
    zookeeper.resume()
    until(lambda: rooms(full, "cluster").returncode == 0, "ZooKeeper to answer")
    until(lambda: rooms(full, "doctor", **given).returncode == 0, "every store to answer")


def test_commands_beside_the_embedded_shape(memory: Path) -> None:
    with serving(memory) as service:
        agreed = rooms(service, "doctor")
        agreement = (0, "database, broker and magazines agree\n")
        assert (agreed.returncode, agreed.stdout) == agreement, agreed.stderr
        for name, url in (
            ("MAGAZINE_URL", AEROSPIKE),
            ("BROKER_URL", "stomp://u:s3cret@127.0.0.1:1"),
        ):
            refused = rooms(service, "doctor", "--repair", **{name: url})
            assert refused.returncode == 1
            assert f"set {name} to nothing" in refused.stderr
            assert "s3cret" not in refused.stderr
        assert "worker up" in rooms(service, "status").stdout
        killed = service.kill("postgres")
        service.await_another("postgres", killed)
        service.await_ready()
        until(
            lambda: rooms(service, "doctor").returncode == 0, "the processes to be on record again"
        )


def test_unreachable_magazine_store_does_not_stop_publishing(memory: Path, sink: Sink) -> None:
    """No server listens at MAGAZINE_URL. A command without it still checks that store."""
    with serving(memory, settings={"MAGAZINE_URL": AEROSPIKE}, without={"magazines"}) as service:
        answer = service.http.get("/health/ready")
        assert (answer.status_code, answer.json()["degraded"]) == (200, ["magazines"])
        assert service.metric("rooms_magazines_up") == 0
        place = Place.open(service, sink)
        hook = place.push()
        message = place.publish({"n": 1})
        place.await_state(message["message_id"], hook.id, "delivered")
        assert away(service) == ["magazines"]
        assert (
            "magazines: the store of MAGAZINE_URL does not answer"
            in rooms(service, "status").stderr
        )


def test_a_sideline_on_aerospike_is_examined_there(
    aerospike_server: AerospikeServer, memory: Path, sink: Sink
) -> None:
    """A command without MAGAZINE_URL must not check, or repair, PostgreSQL's magazines."""
    with serving(memory, settings={"MAGAZINE_URL": aerospike_server.url}) as service:
        place = Place.open(service, sink, delivery_attempts=0)
        hook = place.push()
        sink.script(hook.path, then=500)
        for number in range(20):
            place.publish({"n": number})
        loaded = "SELECT count(*) FROM sidelined WHERE shard IS NOT NULL"
        until(lambda: service.rows(loaded) == [(20,)], "the sideline to be loaded")
        for options in ((), ("--repair",)):
            assert findings(service, *options) == []
        assert service.rows("SELECT count(*) FROM magazine_entries") == [(0,)]
        until(lambda: service.metric("rooms_magazines_up") == 1, "the store to be up")

        aerospike_server.freeze()
        assert away(service) == ["magazines"]
        assert json.loads(rooms(service, "doctor", "--repair", "--json").stdout)["repair_refused"]
        until(lambda: service.metric("rooms_magazines_up") == 0, "the store to be missed")
        assert service.http.get("/health/ready").json()["degraded"] == ["magazines"]
        aerospike_server.thaw()
        service.await_ready()
        assert findings(service) == []


def test_deliveries_missing_from_a_restored_database_return_by_shovel(
    artemis: TestServer, memory: Path, sink: Sink
) -> None:
    """The database is restored to before the publishing; Artemis has the messages."""
    settings = {"BROKER_URL": artemis.url + HEARTBEAT, "ROOMS_FARM": f"earlier-{os.getpid()}"}
    with serving(memory, settings=settings) as service:
        place = Place.open(service, sink)
        queue = place.queue()
    data, earlier = memory / "rooms" / "postgres", memory / "earlier"
    shutil.copytree(data, earlier, symlinks=True)
    with serving(memory, settings=settings) as service:
        place.service = service
        for number in range(3):
            place.publish({"n": number})
        until(
            lambda: service.rows("SELECT count(*) FROM outbox WHERE kind = 5") == [(3,)],
            "the copies to be in the broker",
        )
    shutil.rmtree(data)
    earlier.rename(data)
    with serving(memory, settings=settings) as service:
        place.service = service
        given = {"BROKER_URL": artemis.url}
        (finding,) = findings(service, "--patience", "0", **given)
        assert (finding["part"], finding["count"], finding["examples"]) == ("broker", 3, [queue])
        assert "`rooms doctor --repair` does it now" in finding["advice"]
        findings(service, "--patience", "0", "--repair", **given)
        reference = f"{place.made['name']}/queue"
        (finding,) = findings(service, **given)
        assert (finding["part"], finding["count"], finding["examples"]) == (
            "orphans",
            3,
            [reference],
        )
        assert f"`rooms sideline shovel {reference} --reason orphan`" in finding["advice"]
        shoveled = rooms(service, "sideline", "shovel", reference, "--reason", "orphan", "--follow")
        assert shoveled.returncode == 0, shoveled.stderr
        found = place.pull_all(queue, 3)
        assert sorted(message["payload"]["n"] for message in found) == [0, 1, 2]
