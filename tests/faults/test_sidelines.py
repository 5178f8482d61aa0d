"""Sidelines as processes: filled, shoveled by one command, with maintenance killed during its work.

Oracle, on every store of magazines: every message reaches its endpoint exactly once after the
endpoint is back, and nothing is left in the sideline.
"""

import asyncio
import json
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from delivery.magazines import open_magazines
from delivery.sideline.magazines import sideline_magazine_name
from rooms.domain.ids import SubscriptionId
from rooms.settings import SCHEMES
from tests.conftest import administer, at
from tests.support.aerospike_server import AerospikeServer, aged
from tests.support.cli_runner import Terminal
from tests.support.polling import until
from tests.support.process_group import Crew, Process, assembled
from tests.support.room import EVENT_TYPE, Hook, Place
from tests.support.webhook_sink import Sink

MANY: Final = 1000
SOME: Final = 60
WITHIN_S: Final = 60.0
AGE: Final = """
UPDATE magazine_entries SET loaded_at = loaded_at - interval '1 h', fire_ts = fire_ts - interval '1 h' RETURNING 1
"""


@pytest.fixture(scope="module", params=SCHEMES["MAGAZINE_URL"])
def crew_and_api(
    request: pytest.FixtureRequest,
    postgres_url: str,
    template: str,
    database_numbers: Iterator[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Crew, Process]]:
    settings = {}
    if request.param != "postgresql":
        url = request.getfixturevalue(f"{request.param}_url")
        settings = {"MAGAZINE_URL": url, "ROOMS_CLIENT": f"crew-{secrets.token_hex(4)}"}
    name = f"crew_{os.getpid()}_{next(database_numbers)}"
    administer(postgres_url, "CREATE DATABASE {} TEMPLATE {}", name, template)
    with assembled(
        tmp_path_factory.mktemp("crew"), at(postgres_url, name), environment=settings
    ) as crew_and_api:
        yield crew_and_api
    administer(postgres_url, "DROP DATABASE {} WITH (FORCE)", name)


def age(crew: Crew) -> None:
    """Make everything in magazines loaded and fired an hour earlier."""
    if (url := crew.broker.get("MAGAZINE_URL")) is None:
        crew.rows(AGE)
    else:
        aged(url, crew.broker["ROOMS_CLIENT"], by_s=3600)


def terminal_of(crew: Crew, folder: Path) -> Terminal:
    """Return a terminal with the crew's key, on its database."""
    key = crew.http.headers["authorization"].removeprefix("Bearer ")
    return Terminal(
        folder,
        {
            "ROOMS_URL": crew.url,
            "ROOMS_API_KEY": key,
            "DATABASE_URL": crew.database_url,
            **crew.broker,
        },
    )


def publish(place: Place, count: int) -> set[str]:
    """Publish this many messages and return their ids."""
    found: set[str] = set()
    for start in range(0, count, 500):
        batch = [
            {"event_type": EVENT_TYPE, "payload": n} for n in range(start, min(count, start + 500))
        ]
        answer = place.service.post(f"{place.at}/messages/batch", {"messages": batch})
        found |= {message["message_id"] for message in answer["messages"]}
    return found


def count(crew: Crew, hook: str, state: str) -> int:
    return int(
        crew.rows(
            "SELECT count(*) FROM deliveries WHERE subscription_id = %s AND state = %s", hook, state
        )[0][0]
    )


def await_state(crew: Crew, hook: str, state: str, wanted: int) -> None:
    until(
        lambda: count(crew, hook, state) == wanted,
        f"{wanted} deliveries to be {state}",
        within_s=WITHIN_S,
        pause_s=0.1,
    )


def magazine(crew: Crew, hook: str) -> dict[str, Any]:
    found: dict[str, Any] = crew.get(f"/magazines/subscription-{hook}_SIDELINE")
    return found


def await_loaded(crew: Crew, hook: str, wanted: int) -> None:
    def loaded() -> bool:
        unloaded = crew.rows(
            "SELECT count(*) FROM sidelined WHERE subscription_id = %s AND shard IS NULL", hook
        )
        return magazine(crew, hook)["depth"] >= wanted and unloaded == [(0,)]

    until(loaded, f"{wanted} entries in the magazine", within_s=WITHIN_S, pause_s=0.1)


def fill(crew: Crew, place: Place, sink: Sink, wanted: int) -> tuple[Hook, int]:
    """Sideline everything of a subscription whose endpoint is down; return the failed attempts."""
    hook = place.push(delivery_attempts=1, delivery_delay_ms=10)
    sink.script(hook.path, then=503)
    messages = publish(place, wanted)
    assert len(messages) == wanted
    await_state(crew, hook.id, "sidelined", wanted)
    return hook, len(sink.arrivals(hook.path))


def arrived_once(crew: Crew, sink: Sink, hook: Hook, before: int, wanted: int) -> None:
    """Check that all are delivered once and nothing is sidelined."""
    await_state(crew, hook.id, "delivered", wanted)
    came = Counter(arrival.webhook_id for arrival in sink.arrivals(hook.path)[before:])
    assert len(came) == wanted
    assert set(came.values()) == {1}
    assert crew.get(f"/subscriptions/{hook.id}/sideline")["items"] == []


async def fire(crew: Crew, hook: str) -> int:
    """Fire all entries of a sideline without finishing them; return their number."""
    url, client = (
        crew.broker.get("MAGAZINE_URL", crew.database_url),
        crew.broker.get("ROOMS_CLIENT", "default"),
    )
    async with open_magazines(url, farm="rooms", client=client) as magazines:
        return len(
            await (await magazines.open(sideline_magazine_name(SubscriptionId(hook)))).fire(SOME)
        )


def done(crew: Crew, job: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def ended() -> bool:
        found.update(crew.get(f"/jobs/{job}"))
        return found["state"] in {"done", "failed"}

    until(ended, lambda: f"the job to end; it is {found}", within_s=WITHIN_S, pause_s=0.1)
    assert found["state"] == "done", found
    return found


def test_an_endpoint_down_for_its_whole_retry_schedule(
    crew: Crew, place: Place, sink: Sink, tmp_path: Path
) -> None:
    """Sideline everything with its reason; then one command shovels all of it."""
    crew.start("worker")
    crew.start("upkeep")
    hook, before = fill(crew, place, sink, MANY)
    assert before == 2 * MANY
    terminal = terminal_of(crew, tmp_path)
    items = terminal.json("sideline", "list", hook.id, "--all")["items"]
    assert len({item["delivery_id"] for item in items}) == MANY
    assert {
        (item["reason"], item["attempts"], item["last_status"], item["shovel_count"])
        for item in items
    } == {("attempts_exhausted", 2, 503, 0)}
    assert all(item["last_error"].startswith("status") for item in items)
    await_loaded(crew, hook.id, MANY)
    (put_aside,) = [
        one for one in terminal.json("status")["subscriptions"] if one["subscription_id"] == hook.id
    ]
    assert (put_aside["sidelined"], put_aside["host"], put_aside["last_status"]) == (
        MANY,
        "127.0.0.1",
        503,
    )
    assert (put_aside["condition"], put_aside["last_delivered_at"]) == ("failing", None)

    sink.script(hook.path)
    job = terminal.json("sideline", "shovel", hook.id, "--follow")
    assert (job["state"], job["done"], job["result"]) == ("done", MANY, {"queued": MANY})
    arrived_once(crew, sink, hook, before, MANY)
    assert magazine(crew, hook.id)["depth"] == 0
    assert hook.id not in {
        one["subscription_id"] for one in terminal.json("status")["subscriptions"]
    }


@pytest.mark.parametrize(
    "point", ["after taking entries", "after shoveling rows", "after forgetting entries"]
)
def test_maintenance_is_killed_during_a_shovel(
    crew: Crew, place: Place, sink: Sink, tmp_path: Path, point: str
) -> None:
    """Kill one process: another continues the job, moves nothing again, and counts everything."""
    crew.start("worker")
    dying = crew.start("upkeep", point)
    hook, before = fill(crew, place, sink, SOME)
    await_loaded(crew, hook.id, SOME)
    sink.script(hook.path)
    # Slowly, so that there are several batches, and the kill leaves some of them.
    terminal = terminal_of(crew, tmp_path)
    job = terminal.json("sideline", "shovel", hook.id, "--rate", "200", "--concurrency", "1")
    dying.await_death()
    left = count(crew, hook.id, "sidelined")
    assert 0 < left <= SOME
    crew.start("upkeep")
    found = done(crew, job["id"])
    assert (found["done"], found["total"], found["result"]) == (SOME, SOME, {"queued": SOME})
    arrived_once(crew, sink, hook, before, SOME)
    # The killed process left entries that no row names; the audit deletes them once they are old.
    age(crew)
    terminal.run("doctor", "--repair")
    assert terminal.json("doctor")["open"] == 0
    assert magazine(crew, hook.id)["depth"] == 0


@pytest.mark.parametrize("point", ["after sweeping", "after reloading", "after moving rows"])
def test_maintenance_is_killed_during_a_sweep(
    crew: Crew, place: Place, sink: Sink, tmp_path: Path, point: str
) -> None:
    """Kill the process that rescues stuck entries: the next one rescues them all."""
    crew.start("worker")
    loading = crew.start("upkeep")
    hook, before = fill(crew, place, sink, SOME)
    await_loaded(crew, hook.id, SOME)
    loading.kill()
    assert asyncio.run(fire(crew, hook.id)) == SOME
    age(crew)
    dying = crew.start("upkeep", point)
    terminal = terminal_of(crew, tmp_path)
    swept = terminal.json("magazine", "sweep", f"subscription-{hook.id}_SIDELINE")
    dying.await_death()
    age(crew)
    crew.start("upkeep")
    done(crew, swept["id"])
    assert count(crew, hook.id, "sidelined") == SOME
    age(crew)
    terminal.run("doctor", "--repair")
    assert magazine(crew, hook.id)["depth"] == SOME
    sink.script(hook.path)
    assert terminal.json("sideline", "shovel", hook.id, "--follow")["result"] == {"queued": SOME}
    arrived_once(crew, sink, hook, before, SOME)


@pytest.mark.parametrize("point", ["after loading entries", "after loading rows"])
def test_maintenance_is_killed_during_loading(
    crew: Crew, place: Place, sink: Sink, tmp_path: Path, point: str
) -> None:
    """Kill the loader: orphan entries are deleted, and each delivery has one entry in the end."""
    crew.start("worker")
    dying = crew.start("upkeep", point)
    hook, before = fill(crew, place, sink, SOME)
    dying.await_death()
    crew.start("upkeep")
    await_loaded(crew, hook.id, SOME)
    age(crew)
    terminal = terminal_of(crew, tmp_path)
    terminal.run("doctor", "--repair")
    assert terminal.json("doctor")["open"] == 0
    assert magazine(crew, hook.id)["depth"] == SOME
    sink.script(hook.path)
    assert terminal.json("sideline", "shovel", hook.id, "--follow")["result"] == {"queued": SOME}
    arrived_once(crew, sink, hook, before, SOME)


def test_nacked_deliveries_are_shoveled_and_pulled_again(
    crew: Crew, place: Place, tmp_path: Path
) -> None:
    crew.start("upkeep")
    queue = place.queue(max_receives=1)
    message = place.publish({"id": 1})["message_id"]
    (first,) = place.pull(queue, wait_ms=25_000)
    place.settle(queue, "nack", first["ack_id"])
    rested = place.await_state(message, queue, "sidelined")
    terminal = terminal_of(crew, tmp_path)
    (item,) = terminal.json("sideline", "list", queue)["items"]
    assert (item["delivery_id"], item["reason"]) == (rested["id"], rested["reason"])
    assert terminal.json("sideline", "shovel", queue, "--follow")["result"] == {"queued": 1}
    (again,) = place.pull(queue, wait_ms=25_000)
    assert again["message_id"] == message
    assert (
        json.loads(place.settle(queue, "ack", again["ack_id"]).text)["results"][0]["status"]
        == "acked"
    )
    place.await_state(message, queue, "delivered")
    assert place.pull(queue) == []


@pytest.fixture
def on_aerospike(
    postgres_url: str,
    template: str,
    database_numbers: Iterator[int],
    tmp_path: Path,
    aerospike_server: AerospikeServer,
) -> Iterator[tuple[Crew, Process]]:
    """Yield a crew whose magazines are in its own Aerospike, and whose metrics add up."""
    name = f"crew_{os.getpid()}_{next(database_numbers)}"
    administer(postgres_url, "CREATE DATABASE {} TEMPLATE {}", name, template)
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    settings = {"MAGAZINE_URL": aerospike_server.url, "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
    with assembled(tmp_path, at(postgres_url, name), environment=settings) as crew_and_api:
        yield crew_and_api
    administer(postgres_url, "DROP DATABASE {} WITH (FORCE)", name)


def test_an_emptied_aerospike_is_filled_from_postgresql(
    on_aerospike: tuple[Crew, Process],
    aerospike_server: AerospikeServer,
    sink: Sink,
    tmp_path: Path,
) -> None:
    """Empty the store under a full sideline: it is filled again, counted, and nothing is lost."""
    crew, _ = on_aerospike
    place = Place.open(crew, sink, delivery_delay_ms=50)
    crew.start("worker")
    upkeep = crew.start("upkeep")
    hook, before = fill(crew, place, sink, 3 * SOME)
    await_loaded(crew, hook.id, 3 * SOME)
    upkeep.kill()
    aerospike_server.kill()
    aerospike_server.start()
    assert crew.metric("rooms_sideline_lost_total") == 0
    crew.start("upkeep")
    await_loaded(crew, hook.id, 3 * SOME)
    assert crew.metric("rooms_sideline_lost_total") == 3 * SOME
    assert count(crew, hook.id, "sidelined") == 3 * SOME
    sink.script(hook.path)
    terminal = terminal_of(crew, tmp_path)
    assert terminal.json("sideline", "shovel", hook.id, "--follow")["result"] == {
        "queued": 3 * SOME
    }
    arrived_once(crew, sink, hook, before, 3 * SOME)
    assert terminal.json("doctor")["open"] == 0
    assert magazine(crew, hook.id)["depth"] == 0
