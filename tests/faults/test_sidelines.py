"""Sidelines from outside, as processes: filled, brought back by one command, and whoever works on them killed in the middle.

Oracle: every message reaches its endpoint exactly once after the endpoint is back, and nothing is left in the sideline. All of it
on every store of magazines.
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
from delivery.sideline.shelves import magazine_of
from rooms.domain.ids import SubscriptionId
from rooms.settings import SCHEMES
from tests.aerospike_server import AerospikeServer, aged
from tests.conftest import administer, at
from tests.faults.crew import Crew, Process, assembled
from tests.place import EVENT_TYPE, Hook, Place
from tests.sink import Sink
from tests.terminal import Terminal
from tests.waiting import until

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
    with assembled(tmp_path_factory.mktemp("crew"), at(postgres_url, name), environment=settings) as crew_and_api:
        yield crew_and_api
    administer(postgres_url, "DROP DATABASE {} WITH (FORCE)", name)


def age(crew: Crew) -> None:
    """Whatever stands in magazines was loaded, and handed out, an hour earlier."""
    if (url := crew.broker.get("MAGAZINE_URL")) is None:
        crew.rows(AGE)
    else:
        aged(url, crew.broker["ROOMS_CLIENT"], by_s=3600)


def terminal_of(crew: Crew, folder: Path) -> Terminal:
    """The command line with the crew's key, on its database."""
    key = crew.http.headers["authorization"].removeprefix("Bearer ")
    return Terminal(
        folder, {"ROOMS_URL": crew.url, "ROOMS_API_KEY": key, "DATABASE_URL": crew.database_url, **crew.broker}
    )


def publish(place: Place, count: int) -> set[str]:
    """So many messages; their ids."""
    found: set[str] = set()
    for start in range(0, count, 500):
        batch = [{"event_type": EVENT_TYPE, "payload": n} for n in range(start, min(count, start + 500))]
        answer = place.service.post(f"{place.at}/messages/batch", {"messages": batch})
        found |= {message["message_id"] for message in answer["messages"]}
    return found


def count(crew: Crew, hook: str, state: str) -> int:
    return int(
        crew.rows("SELECT count(*) FROM deliveries WHERE subscription_id = %s AND state = %s", hook, state)[0][0]
    )


def await_state(crew: Crew, hook: str, state: str, wanted: int) -> None:
    until(
        lambda: count(crew, hook, state) == wanted, f"{wanted} deliveries to be {state}", within_s=WITHIN_S, pause_s=0.1
    )


def magazine(crew: Crew, hook: str) -> dict[str, Any]:
    found: dict[str, Any] = crew.get(f"/magazines/subscription-{hook}_SIDELINE")
    return found


def await_loaded(crew: Crew, hook: str, wanted: int) -> None:
    def loaded() -> bool:
        unloaded = crew.rows("SELECT count(*) FROM sidelined WHERE subscription_id = %s AND shard IS NULL", hook)
        return magazine(crew, hook)["depth"] >= wanted and unloaded == [(0,)]

    until(loaded, f"{wanted} entries in the magazine", within_s=WITHIN_S, pause_s=0.1)


def fill(crew: Crew, place: Place, sink: Sink, wanted: int) -> tuple[Hook, int]:
    """A subscription whose endpoint is down until everything is put aside; how often it was called in vain."""
    hook = place.push(delivery_attempts=1, delivery_delay_ms=10)
    sink.script(hook.path, then=503)
    messages = publish(place, wanted)
    assert len(messages) == wanted
    await_state(crew, hook.id, "sidelined", wanted)
    return hook, len(sink.arrivals(hook.path))


def arrived_once(crew: Crew, sink: Sink, hook: Hook, before: int, wanted: int) -> None:
    """All delivered, none doubled, none lost, and nothing rests."""
    await_state(crew, hook.id, "delivered", wanted)
    came = Counter(arrival.webhook_id for arrival in sink.arrivals(hook.path)[before:])
    assert len(came) == wanted
    assert set(came.values()) == {1}
    assert crew.get(f"/subscriptions/{hook.id}/sideline")["items"] == []


async def fire(crew: Crew, hook: str) -> int:
    """Hand everything out of a sideline to somebody who never finishes; how much there was."""
    url, client = crew.broker.get("MAGAZINE_URL", crew.database_url), crew.broker.get("ROOMS_CLIENT", "default")
    async with open_magazines(url, farm="rooms", client=client) as magazines:
        return len(await (await magazines.open(magazine_of(SubscriptionId(hook)))).fire(SOME))


def done(crew: Crew, job: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def ended() -> bool:
        found.update(crew.get(f"/jobs/{job}"))
        return found["state"] in {"done", "failed"}

    until(ended, lambda: f"the job to end; it is {found}", within_s=WITHIN_S, pause_s=0.1)
    assert found["state"] == "done", found
    return found


@pytest.mark.row("B3")
@pytest.mark.row("B4")
def test_an_endpoint_that_was_down_for_its_whole_schedule(crew: Crew, place: Place, sink: Sink, tmp_path: Path) -> None:
    """Everything is put aside with its reason; the endpoint is back, and one command brings all of it."""
    crew.start("worker")
    crew.start("upkeep")
    hook, before = fill(crew, place, sink, MANY)
    assert before == 2 * MANY
    terminal = terminal_of(crew, tmp_path)
    items = terminal.json("sideline", "list", hook.id, "--all")["items"]
    assert len({item["delivery_id"] for item in items}) == MANY
    assert {(item["reason"], item["attempts"], item["last_status"], item["shovel_count"]) for item in items} == {
        ("attempts_exhausted", 2, 503, 0)
    }
    assert all(item["last_error"].startswith("status") for item in items)
    await_loaded(crew, hook.id, MANY)
    (put_aside,) = [one for one in terminal.json("status")["subscriptions"] if one["subscription_id"] == hook.id]
    assert (put_aside["sidelined"], put_aside["host"], put_aside["last_status"]) == (MANY, "127.0.0.1", 503)
    assert (put_aside["condition"], put_aside["last_delivered_at"]) == ("failing", None)

    sink.script(hook.path)
    job = terminal.json("sideline", "shovel", hook.id, "--follow")
    assert (job["state"], job["done"], job["result"]) == ("done", MANY, {"queued": MANY})
    arrived_once(crew, sink, hook, before, MANY)
    assert magazine(crew, hook.id)["depth"] == 0
    assert hook.id not in {one["subscription_id"] for one in terminal.json("status")["subscriptions"]}


@pytest.mark.row("B4")
@pytest.mark.parametrize("point", ["after taking entries", "after shoveling rows", "after forgetting entries"])
def test_upkeep_is_killed_in_the_middle_of_a_shovel(
    crew: Crew, place: Place, sink: Sink, tmp_path: Path, point: str
) -> None:
    """Another goes on with the job; whatever was moved before the kill is not moved again."""
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
    assert done(crew, job["id"])["total"] >= left
    arrived_once(crew, sink, hook, before, SOME)
    # Entries that the killed one has left name nobody, which whoever looks at them when they are old enough sees.
    age(crew)
    terminal.run("doctor", "--repair")
    assert terminal.json("doctor")["open"] == 0
    assert magazine(crew, hook.id)["depth"] == 0


@pytest.mark.row("B6")
@pytest.mark.parametrize("point", ["after sweeping", "after reloading", "after moving rows"])
def test_upkeep_is_killed_in_the_middle_of_a_sweep(
    crew: Crew, place: Place, sink: Sink, tmp_path: Path, point: str
) -> None:
    """Entries were handed out and never finished; the one who rescues them is killed; the next rescues them all."""
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


@pytest.mark.row("B3")
@pytest.mark.parametrize("point", ["after loading entries", "after loading rows"])
def test_upkeep_is_killed_in_the_middle_of_loading(
    crew: Crew, place: Place, sink: Sink, tmp_path: Path, point: str
) -> None:
    """An entry that no row names is cleared away, and each delivery has one in the end."""
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


@pytest.mark.row("B3")
def test_what_was_nacked_out_is_pulled_again(crew: Crew, place: Place, tmp_path: Path) -> None:
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
    assert json.loads(place.settle(queue, "ack", again["ack_id"]).text)["results"][0]["status"] == "acked"
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
    """A crew whose magazines are in an Aerospike of its own, and whose metrics add up."""
    name = f"crew_{os.getpid()}_{next(database_numbers)}"
    administer(postgres_url, "CREATE DATABASE {} TEMPLATE {}", name, template)
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    settings = {"MAGAZINE_URL": aerospike_server.url, "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
    with assembled(tmp_path, at(postgres_url, name), environment=settings) as crew_and_api:
        yield crew_and_api
    administer(postgres_url, "DROP DATABASE {} WITH (FORCE)", name)


@pytest.mark.row("B3")
@pytest.mark.row("B11")
def test_an_aerospike_that_was_emptied_under_a_full_sideline(
    on_aerospike: tuple[Crew, Process], aerospike_server: AerospikeServer, sink: Sink, tmp_path: Path
) -> None:
    """PostgreSQL fills it again, a metric tells, and nothing is lost."""
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
    assert terminal.json("sideline", "shovel", hook.id, "--follow")["result"] == {"queued": 3 * SOME}
    arrived_once(crew, sink, hook, before, 3 * SOME)
    assert terminal.json("doctor")["open"] == 0
    assert magazine(crew, hook.id)["depth"] == 0
