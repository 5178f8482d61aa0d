"""Analyse the service's own log: two of its webhooks fail together, and the commands name them."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import psycopg
import pytest
from click.testing import Result
from pyspark.sql import SparkSession

from tests.support.cli_runner import Terminal
from tests.support.polling import until
from tests.support.service import Service, running
from tests.support.webhook_sink import Arrival, Reply, Sink, sinking

FAILING = ("first", "second")
SUBSCRIPTIONS = (*FAILING, "third", "fourth")
FLAKY = "flaky"
MESSAGES = 12
TRIED = 160
INTERRUPTED = 130


@pytest.fixture
def terminal(
    starting: Future[SparkSession], monkeypatch: pytest.MonkeyPatch, service: Service
) -> Terminal:
    """Run commands in this process, with the shared Spark and only ROOMS_DATA set."""

    @contextmanager
    def shared(**_: object) -> Iterator[SparkSession]:
        yield starting.result()

    monkeypatch.setattr("delivery.analytics.spark.session.spark_session", shared)
    return Terminal(service.data)


@pytest.fixture(scope="module")
def sink() -> Iterator[Sink]:
    with sinking() as sink:
        yield sink


@pytest.fixture(scope="module")
def service(
    starting: Future[SparkSession], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("analysed")) as service:
        yield service


def publish(service: Service, room: int, count: int) -> None:
    messages = [{"event_type": "made", "payload": {"number": number}} for number in range(count)]
    service.post(f"/rooms/{room}/messages/batch", {"messages": messages})


def settled(service: Service) -> None:
    """Wait until every delivery is finished."""
    unfinished = "SELECT count(*) FROM deliveries WHERE state NOT IN ('delivered', 'sidelined')"
    until(lambda: service.rows(unfinished) == [(0,)], "every delivery to end", within_s=120)
    # A row is exported once no older transaction is open, and the service always has some.
    ripe = "SELECT max(xid::text::int8) < pg_snapshot_xmin(pg_current_snapshot())::text::int8 FROM delivery_log"
    until(lambda: service.rows(ripe) == [(True,)], "every row of the log to be ripe for export")


def now_and_then(arrival: Arrival) -> Reply:
    """Fail three tenths of all calls, always the same ones."""
    dice = crc32(f"{json.loads(arrival.body)['number']}:{arrival.attempt}".encode()) % 1000
    return Reply(status=503 if dice < 300 else 204)


def furnish(service: Service, sink: Sink) -> tuple[int, int, dict[str, str]]:
    """Make a room with two failing webhooks and one with an unreliable webhook; name subscriptions."""
    fields = {"delivery_delay_ms": 100, "delivery_delay_multiplier": 1.5, "delivery_attempts": 2}
    rooms = [
        service.post("/rooms", {"name": name, **fields})["id"] for name in ("orders", "invoices")
    ]
    ids: dict[str, str] = {}
    for room, names in zip(rooms, (SUBSCRIPTIONS, (FLAKY,)), strict=True):
        service.post(f"/rooms/{room}/event-types", {"name": "made"})
        for name in names:
            made = {"name": name, "type": "PUSH", "push_url": sink.url(f"/{name}")}
            ids[name] = service.post(f"/rooms/{room}/subscriptions", made)["id"]
    for name in FAILING:
        sink.behave(f"/{name}", lambda _: Reply(status=503))
    sink.behave(f"/{FLAKY}", now_and_then)
    return rooms[0], rooms[1], ids


def test_commands_name_the_pattern_and_a_missing_row(
    service: Service, sink: Sink, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, invoices, ids = furnish(service, sink)
    publish(service, orders, MESSAGES)
    publish(service, invoices, TRIED)
    settled(service)

    before = terminal.run("--json", "incidents")
    assert before.exit_code == 1
    assert "rooms analyze" in before.stderr
    exported = terminal.json("export")
    assert exported["rows"] == service.rows("SELECT count(*) FROM delivery_log")[0][0]

    def run_follow(pauses: Iterator[Callable[[], None]], *options: str) -> Result:
        """Run `analyze --follow`, act in each of its pauses, and stop it with Ctrl-C."""

        def pause(_: float) -> None:
            try:
                next(pauses)()
            except StopIteration:
                raise KeyboardInterrupt from None

        monkeypatch.setattr("rooms.cli.analytics.sleep", pause)
        return terminal.run("--json", "analyze", "--follow", *options)

    def first_pause() -> None:
        check_first_output(service, terminal, ids)
        # Deletes a log row of one delivery before it can be exported.
        publish(service, orders, 2)
        settled(service)
        with psycopg.connect(service.database_url) as connection:
            gone = """UPDATE log_entries SET enqueued = substr(enqueued, 37) WHERE kind = 'published' AND message_id = (
                SELECT max(id::text)::uuid FROM messages WHERE room_id = %s)"""
            assert connection.execute(gone, [orders]).rowcount == 1

    followed = run_follow(iter([first_pause]))
    assert followed.exit_code == INTERRUPTED, followed.output
    whole, later = map(json.loads, followed.stdout.splitlines())
    assert whole["fresh"]
    assert whole["loaded"]
    assert whole["totals"]["enqueued"] == MESSAGES * len(SUBSCRIPTIONS) + TRIED
    assert later["run"] > whole["run"]
    assert later["totals"]["never_enqueued"] == 1
    assert later["incomplete"] is False

    # Its beginning is a hole of the log: it was delivered, so it is not lost.
    lost = terminal.run("--json", "reconcile")
    assert lost.exit_code == 1
    result = json.loads(lost.stdout)
    assert (result["lost"], result["missing"], result["closed"]) == (0, 0, False)
    assert result["never_enqueued"] == 1
    assert [one["room_id"] for one in result["rooms"]] == [orders]
    assert terminal.run("reconcile").exit_code == 1
    # Incidents are not recomputed in every batch of the stream: those of the first run stay.
    assert len(terminal.json("incidents")["items"]) == 1

    def second_pause() -> None:
        publish(service, invoices, 3)
        settled(service)

    # The other engine starts over, answers the same, and follows the log as well.
    here = run_follow(iter([second_pause]), "--engine", "local")
    assert here.exit_code == INTERRUPTED, here.output
    again, more = map(json.loads, here.stdout.splitlines())
    assert again["fresh"]
    assert again["totals"] == later["totals"]
    assert more["totals"]["enqueued"] == later["totals"]["enqueued"] + 3
    assert terminal.run("--json", "reconcile").exit_code == 1


def check_first_output(service: Service, terminal: Terminal, ids: dict[str, str]) -> None:
    """Check the output of commands and API on the complete log."""
    (incident,) = terminal.json("incidents")["items"]
    assert incident["subscriptions"] == sorted(ids[name] for name in FAILING)
    assert incident["kind"] == "shared"
    assert incident["failures"] == incident["attempts"] == MESSAGES * len(FAILING) * 3
    assert incident["late"] == incident["sidelined"] == MESSAGES * len(FAILING)
    assert len(incident["organisations"]) == 1
    assert incident["began_from"] <= incident["began"] <= incident["began_to"]
    (result,) = service.get("/analysis/incidents")["items"]
    assert result["subscriptions"] == incident["subscriptions"]
    assert ids["first"] in terminal.done("incidents")

    books = terminal.json("reconcile")
    assert (books["lost"], books["closed"], books["fanout"]) == (
        0,
        True,
        MESSAGES * len(SUBSCRIPTIONS) + TRIED,
    )
    assert books["delivered"] + books["sidelined"] == books["fanout"]
    assert "nothing is lost" in terminal.run("reconcile").stderr

    (advice,) = terminal.json("retry-advice")["items"]
    assert advice["subscription_id"] == ids[FLAKY]
    assert advice["reproduced"]
    assert advice["expected"]["delivered"] > advice["measured"]["delivered"] + 0.02
    applied = terminal.json("retry-advice", "--apply", ids[FLAKY], ROOMS_URL=service.url)
    policy = advice["recommended"]
    set_now = service.get(f"/subscriptions/{ids[FLAKY]}")
    for found in (applied["subscription"], set_now):
        assert found["delivery_attempts"] == policy["redeliveries"] > 2
        assert found["delivery_delay_ms"] == policy["delay_ms"]
        assert found["delivery_delay_multiplier"] == policy["multiplier"]
    refused = terminal.run("retry-advice", "--apply", ids["third"], ROOMS_URL=service.url)
    assert refused.exit_code == 1
    assert "no advice for" in refused.stderr

    offline = Path(terminal.json("report")["files"][0]).read_text()
    assert "What failed at the end of the log" in offline
    drawn = terminal.json("report", ROOMS_URL=service.url)
    (page,) = drawn["files"]
    html = Path(page).read_text()
    assert drawn["asked_at"] is not None
    assert "What fails now" in html
    assert f"orders/{FAILING[0]}" in html
    one = terminal.json("report", "--subscription", ids[FLAKY], ROOMS_URL=service.url)["files"]
    assert f"<h1>invoices/{FLAKY}</h1>" in Path(one[0]).read_text()
    assert page == str(service.data / "report.html")
    assert "failed together" in html
    assert all(ids[name] in html for name in SUBSCRIPTIONS)
    assert html.count("<svg") >= 5


def test_a_command_without_the_extra_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rooms.cli.analytics.find_spec", lambda name: None)
    for command in ("export", "analyze", "incidents", "reconcile", "retry-advice", "report"):
        result = Terminal(tmp_path).run(command)
        assert result.exit_code == 1
        assert "pip install '.[spark]'" in result.stderr
