"""The service's own log through the whole pipeline: two of its webhooks fail together, and the commands say which."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

from tests.service import Service, running
from tests.sink import Reply, Sink, sinking
from tests.terminal import Terminal
from tests.waiting import until

FAILING = ("first", "second")
SUBSCRIPTIONS = (*FAILING, "third", "fourth")
MESSAGES = 12


@pytest.fixture
def terminal(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, service: Service) -> Terminal:
    """Commands in this process, on the Spark that all tests share, with ROOMS_DATA alone to go by."""

    @contextmanager
    def shared() -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr("delivery.correlation.session.spark_session", shared)
    return Terminal(service.data)


@pytest.fixture(scope="module")
def sink() -> Iterator[Sink]:
    with sinking() as sink:
        yield sink


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("analysed")) as service:
        yield service


def publish(service: Service, room: int, count: int) -> None:
    for number in range(count):
        service.post(f"/rooms/{room}/messages", {"event_type": "made", "payload": {"number": number}})


def settled(service: Service) -> None:
    """Until every delivery has its end."""
    unfinished = "SELECT count(*) FROM deliveries WHERE state NOT IN ('delivered', 'sidelined')"
    until(lambda: service.rows(unfinished) == [(0,)], "every delivery to end", within_s=60)


def test_a_real_log_names_the_pattern_and_a_missing_row(service: Service, sink: Sink, terminal: Terminal) -> None:
    fields = {"delivery_delay_ms": 100, "delivery_delay_multiplier": 1.5, "delivery_attempts": 2}
    room = service.post("/rooms", {"name": "orders", **fields})["id"]
    service.post(f"/rooms/{room}/event-types", {"name": "made"})
    ids: dict[str, str] = {}
    for name in SUBSCRIPTIONS:
        made = {"name": name, "type": "PUSH", "push_url": sink.url(f"/{name}")}
        ids[name] = service.post(f"/rooms/{room}/subscriptions", made)["id"]
    for name in FAILING:
        sink.behave(f"/{name}", lambda _: Reply(status=503))
    publish(service, room, MESSAGES)
    settled(service)

    before = terminal.run("--json", "incidents")
    assert before.exit_code == 1
    assert "rooms analyze" in before.stderr
    exported = terminal.json("export")
    assert exported["rows"] == service.rows("SELECT count(*) FROM delivery_log")[0][0]
    analysed = terminal.json("analyze")
    assert analysed["fresh"]
    assert analysed["loaded"]
    assert analysed["totals"]["enqueued"] == MESSAGES * len(SUBSCRIPTIONS)

    (incident,) = terminal.json("incidents")["items"]
    assert incident["subscriptions"] == sorted(ids[name] for name in FAILING)
    assert incident["kind"] == "shared"
    assert incident["failures"] == incident["attempts"] == MESSAGES * len(FAILING) * 3
    (told,) = service.get("/analysis/incidents")["items"]
    assert told["subscriptions"] == incident["subscriptions"]
    assert ids["first"] in terminal.done("incidents")

    books = terminal.json("reconcile")
    assert (books["lost"], books["closed"], books["fanout"]) == (0, True, MESSAGES * len(SUBSCRIPTIONS))
    assert (books["delivered"], books["sidelined"]) == (MESSAGES * 2, MESSAGES * 2)
    assert "nothing is lost" in terminal.run("reconcile").stderr
    assert isinstance(terminal.json("advise")["items"], list)

    # A row of the log that is gone before it could be exported, of one delivery of the next messages.
    publish(service, room, 2)
    settled(service)
    with psycopg.connect(service.database_url) as connection:
        gone = "DELETE FROM delivery_log WHERE kind = 'enqueued' AND delivery_id = (SELECT max(id::text)::uuid FROM deliveries)"
        assert connection.execute(gone).rowcount == 1
    terminal.json("analyze")
    lost = terminal.run("--json", "reconcile")
    assert lost.exit_code == 1
    told = json.loads(lost.stdout)
    assert (told["lost"], told["missing"], told["closed"]) == (1, 1, False)
    assert [one["room_id"] for one in told["rooms"]] == [room]
    assert terminal.run("reconcile").exit_code == 1


def test_without_the_extra_a_command_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delivery.cli.extra.find_spec", lambda name: None)
    for command in ("export", "analyze", "incidents", "reconcile", "advise"):
        result = Terminal(tmp_path).run(command)
        assert result.exit_code == 1
        assert "pip install 'rooms[spark]'" in result.stderr
