"""Test the whole service on an Artemis that is suspended, has a full disk, or has lost all data.

Oracle: publishers notice nothing, readiness and metrics do. Every accepted message is delivered,
without unnecessary attempts.
"""

import os
from collections.abc import Iterator

import pytest

from rooms.local import FetchError, MissingError
from rooms.local.java_servers import EmbeddedArtemis
from tests.conftest import in_memory
from tests.support.local_servers import TestServer, make_artemis, run_server
from tests.support.polling import until
from tests.support.room import Place
from tests.support.servers import unavailable
from tests.support.service import Service
from tests.support.service import running as serving
from tests.support.webhook_sink import Sink

MESSAGES = 20
RETRY_MS = 50_000
"""Shorter than the broker's look-ahead, and longer than one failed attempt of everything."""
FULL_DISK = {"rooms.max.disk.usage.percent": "0", "rooms.disk.scan.period.ms": "100"}
BLOCKS = "AMQ222210"
"""The broker logs this when its disk is full."""

IN_THE_BROKER = """
SELECT count(*) FILTER (WHERE kind = 4 AND attempt = 1), count(*) FILTER (WHERE kind = 5)
FROM outbox WHERE room_id = %s
"""


@pytest.fixture(scope="module")
def artemis(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[EmbeddedArtemis, TestServer]]:
    try:
        server = make_artemis(tmp_path_factory.mktemp("artemis"))
        with run_server(server) as handle:
            yield server, handle
    except (MissingError, FetchError) as missing:
        unavailable(str(missing))


@pytest.fixture
def broker(artemis: tuple[EmbeddedArtemis, TestServer]) -> TestServer:
    return artemis[1]


@pytest.fixture(scope="module")
def service(
    artemis: tuple[EmbeddedArtemis, TestServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    # The broker counts as suspended after a second without a heartbeat.
    settings = {
        "BROKER_URL": f"{artemis[1].url}?heartbeat_ms=1000",
        "ROOMS_FARM": f"away-{os.getpid()}",
    }
    with (
        in_memory(tmp_path_factory.mktemp("service")) as folder,
        serving(folder, settings=settings) as service,
    ):
        yield service


@pytest.fixture
def place(service: Service, sink: Sink) -> Place:
    service.await_ready()
    return Place.open(service, sink, delivery_delay_ms=RETRY_MS, delivery_attempts=5)


def rows(service: Service, place: Place, *kinds: int) -> int:
    """Return how many rows of the room's outbox have these kinds."""
    ((count,),) = service.rows(
        "SELECT count(*) FROM outbox WHERE room_id = %s AND kind = ANY (%s)", place.id, list(kinds)
    )
    return int(count)


def delivered(service: Service, place: Place, count: int) -> None:
    states = "SELECT state::text, count(*) FROM deliveries WHERE room_id = %s GROUP BY state"
    until(
        lambda: service.rows(states, place.id) == [("delivered", count)],
        "everything to be delivered",
    )
    assert rows(service, place, *range(8)) == 0


def degraded(service: Service) -> list[str]:
    found: list[str] = service.http.get("/health/ready").json()["degraded"]
    return found


def pull_all(place: Place, queue: str, count: int) -> None:
    pulled: list[str] = []
    while len(pulled) < count:
        messages = place.pull(queue, most=100, wait_ms=25_000)
        assert messages, f"{len(pulled)} of {count} came"
        pulled += [message["message_id"] for message in messages]
        place.settle(queue, "ack", *(message["ack_id"] for message in messages))
    assert len(set(pulled)) == len(pulled) == count


def test_suspended_broker_blocks_no_publisher(
    service: Service, place: Place, sink: Sink, broker: TestServer
) -> None:
    hook, queue = place.push(), place.queue()
    place.publish("before")
    sink.wait(hook.path)
    broker.suspend()
    try:
        until(lambda: degraded(service) == ["broker"], "readiness to tell of it")
        assert service.metric("rooms_broker_up") == 0
        for number in range(1, MESSAGES):
            place.publish(number)
        assert rows(service, place, 2) >= MESSAGES - 1
        assert place.pull(queue) == []
    finally:
        broker.resume()
    pull_all(place, queue, MESSAGES)
    delivered(service, place, 2 * MESSAGES)
    assert len(sink.arrivals(hook.path)) == MESSAGES
    service.await_ready()
    until(lambda: service.metric("rooms_broker_up") == 1, "the metric to tell of it")


def test_broker_with_full_disk_delays_deliveries(
    service: Service, place: Place, sink: Sink, artemis: tuple[EmbeddedArtemis, TestServer]
) -> None:
    """It delays all that it does not accept, which is neither refused nor sidelined.

    What it lost by the restart that found the disk full is sent again when it has space.
    """
    server, broker = artemis
    hook, queue = place.push(), place.queue()
    place.publish("before")
    until(
        lambda: (rows(service, place, 2, 3), rows(service, place, 5)) == (0, 1),
        "the message to be in the broker",
    )
    failures = service.metric("rooms_relay_failures_total")
    server.properties = FULL_DISK
    try:
        broker.restart()
        until(lambda: BLOCKS in broker.log.read_text(), "the broker to find its disk full")
        for number in range(1, MESSAGES):
            place.publish(number)
        until(
            lambda: service.metric("rooms_relay_failures_total") > failures,
            "the relay to be refused",
        )
        assert place.pull(queue) == []
        assert rows(service, place, 2, 3) == 2 * (MESSAGES - 1)
    finally:
        server.properties = {}
        broker.restart()
    pull_all(place, queue, MESSAGES)
    delivered(service, place, 2 * MESSAGES)
    assert len(sink.arrivals(hook.path)) == MESSAGES


def test_wiped_broker_gets_every_delivery_again(
    service: Service, place: Place, sink: Sink, broker: TestServer
) -> None:
    """The broker is wiped with messages in a PULL queue, waiting retries, and a running attempt.

    Each is delivered, and none twice. Deliveries attempted before keep their attempts.
    """
    hook, slow, queue = place.push(), place.push("slow", delivery_delay_ms=100), place.queue()
    sink.script(hook.path, *[503] * MESSAGES)
    sink.script(slow.path, 0)
    for number in range(MESSAGES):
        place.publish(number, priority=9 if number else 4)
    sink.wait(hook.path, MESSAGES)
    until(
        lambda: service.rows(IN_THE_BROKER, place.id) == [(MESSAGES, MESSAGES)],
        "all to be in the broker",
    )
    broker.erase()
    until(lambda: degraded(service) == ["broker"], "readiness to tell of it")
    place.publish("meanwhile")
    for table in ("deliveries", "outbox"):  # the time of the retries comes while it is away
        service.rows(
            f"UPDATE {table} SET due_at = now() WHERE room_id = %s AND due_at > now() RETURNING 1",
            place.id,
        )
    broker.start()
    service.await_ready()
    pull_all(place, queue, MESSAGES + 1)
    total = 3 * (MESSAGES + 1)
    delivered(service, place, total)
    counted = service.rows(
        "SELECT count(*) FROM delivery_log "
        "WHERE room_id = %s AND kind = 'restored' AND detail = 'lost_by_broker'",
        place.id,
    )
    assert counted[0][0] >= 2 * MESSAGES
    steps = [(arrival.webhook_id, arrival.attempt) for arrival in sink.arrivals(hook.path)]
    assert len(steps) == len(set(steps)) == 2 * MESSAGES + 1
