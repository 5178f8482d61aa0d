"""The doctor beside an installation that runs: which stores it examines, what it says of those that do not answer, and
that it repairs nothing unless all of them do.
"""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from delivery.doctor.orphans import OrphanExamination
from delivery.doctor.stores import StoreExamination
from delivery.magazines import open_magazines
from delivery.sideline.loader import Loader
from delivery.sideline.shelves import Shelves
from rooms.backends import DATABASE, Backends, ProcessRecord
from rooms.domain.states import State, SubscriptionType
from rooms.errors import BrokerUnavailableError
from rooms.storage.engine import connection_for
from rooms.storage.orphans import adopt
from rooms.storage.processes import confirm
from rooms.storage.shovels import Shovels
from rooms.storage.sidelines import Sidelines, Step
from rooms.storage.writer import Writer
from tests.installation import Installation
from tests.terminal import Terminal

NOWHERE = "127.0.0.1:1"
AEROSPIKE = f"aerospike://{NOWHERE}/ns"
EMBEDDED = Backends(broker=DATABASE, election=DATABASE, magazines=DATABASE, farm="rooms", client="default")


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    return Terminal(tmp_path)


async def doctor(terminal: Terminal, url: str, *options: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and the report; for a command that is refused, the error."""
    environment = {"DATABASE_URL": url, **environment}
    result = await asyncio.to_thread(terminal.run, "--json", "doctor", *options, **environment)
    return result.exit_code, json.loads(result.stdout or result.stderr)


async def runs(url: str, kind: str, **differing: str) -> None:
    """A process of that kind is on record."""
    backends = dataclasses.replace(EMBEDDED, **differing)
    process = ProcessRecord(name=kind, kind=kind, host="h", pid=7, seen_s=0, running=True, backends=backends)
    async with connection_for(url, name="test") as connection:
        await confirm(connection, process)


async def lost_one(installation: Installation) -> Any:
    """A delivery without work, which a repair would queue again."""
    (copy,) = await installation.publish(await installation.subscribe())
    return copy


async def untouched(installation: Installation, copy: Any) -> bool:
    return await installation.work("outbox", copy) is None and (await installation.delivery(copy))["generation"] == 0


async def test_the_doctor_examines_the_stores_that_run_and_not_those_of_its_own_environment(
    installation: Installation, terminal: Terminal
) -> None:
    """Without MAGAZINE_URL it looked into PostgreSQL's magazines, and every entry was lost there."""
    await runs(installation.url, "serve", magazines=AEROSPIKE)
    code, report = await doctor(terminal, installation.url)
    (finding,) = report["findings"]
    assert (code, finding["part"], finding["away"]) == (1, "magazines", True)
    assert finding["what"].startswith(f"{AEROSPIKE} does not answer")


async def test_a_repair_is_refused_while_a_store_is_away(installation: Installation, terminal: Terminal) -> None:
    copy = await lost_one(installation)
    for given in (
        {"MAGAZINE_URL": AEROSPIKE},
        {"BROKER_URL": f"stomp://u:s3cret@{NOWHERE}"},
        {"ELECTION_URL": f"zookeeper://{NOWHERE}"},
    ):
        code, report = await doctor(terminal, installation.url, "--repair", **given)
        assert (code, report["repair_refused"]) == (1, True)
        assert [finding["away"] for finding in report["findings"]] == [True]
        assert "Start the server" in report["findings"][0]["advice"]
        assert "s3cret" not in json.dumps(report)
        assert await untouched(installation, copy)
    shown = await asyncio.to_thread(
        terminal.run, "doctor", "--repair", DATABASE_URL=installation.url, MAGAZINE_URL=AEROSPIKE
    )
    assert "nothing was repaired: magazines does not answer" in shown.stdout
    assert "agree" not in shown.stdout


async def test_what_can_be_examined_is_examined_while_a_store_is_away(
    installation: Installation, terminal: Terminal
) -> None:
    await lost_one(installation)
    code, report = await doctor(terminal, installation.url, BROKER_URL=f"stomp://u:p@{NOWHERE}")
    assert code == 1
    assert [finding["part"] for finding in report["findings"]] == ["deliveries", "broker"]
    shown = await asyncio.to_thread(
        terminal.run, "doctor", DATABASE_URL=installation.url, BROKER_URL=f"stomp://u:p@{NOWHERE}"
    )
    assert "broker could not be examined" in shown.stdout
    assert "1 left as they are: rooms doctor --repair puts them right once every store answers" in shown.stdout


@pytest.mark.parametrize(
    ("differing", "environment", "both"),
    [
        ({"broker": "stomp://***@a:1"}, {"BROKER_URL": "stomp://u:s3cret@b:1"}, ("stomp://***@a:1", "stomp://***@b:1")),
        ({"broker": "stomp://***@a:1"}, {}, ("BROKER_URL is not set", "stomp://***@a:1")),
        ({}, {"MAGAZINE_URL": AEROSPIKE}, (AEROSPIKE, "postgresql")),
        (
            {"magazines": AEROSPIKE},
            {"ROOMS_FARM": "other"},
            ("ROOMS_FARM is other here", "and rooms in the running processes (serve 7 on h)"),
        ),
    ],
)
async def test_an_environment_that_does_not_fit_what_runs_is_refused(
    installation: Installation,
    terminal: Terminal,
    differing: Mapping[str, str],
    environment: Mapping[str, str],
    both: tuple[str, str],
) -> None:
    copy = await lost_one(installation)
    await runs(installation.url, "serve", **differing)
    for options in ((), ("--repair",)):
        code, error = await doctor(terminal, installation.url, *options, **environment)
        assert code == 1
        (problem,) = error["problems"]
        assert all(part in problem for part in both), problem
        assert "set " in problem
        assert "s3cret" not in json.dumps(error)
    assert await untouched(installation, copy)


async def test_a_change_of_stores_under_way_is_reported_and_not_repaired_into(
    installation: Installation, terminal: Terminal
) -> None:
    copy = await lost_one(installation)
    await runs(installation.url, "serve")
    await runs(installation.url, "worker", magazines=AEROSPIKE)
    code, report = await doctor(terminal, installation.url, MAGAZINE_URL=AEROSPIKE)
    assert code == 1
    (mixed,) = report["mixed"]
    assert "postgresql (serve 7 on h)" in mixed
    assert f"{AEROSPIKE} (worker 7 on h)" in mixed
    code, error = await doctor(terminal, installation.url, "--repair", MAGAZINE_URL=AEROSPIKE)
    assert code == 1
    assert "nothing was repaired: the processes run on different stores" in error["title"]
    assert await untouched(installation, copy)


async def test_a_store_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    async def refuse() -> None:
        raise BrokerUnavailableError("connection refused")

    async def answer() -> None:
        return

    monkeypatch.setattr("delivery.doctor.stores.PATIENCE_S", 0.01)
    addresses = dict.fromkeys(("broker", "election", "magazines"), "scheme://h")
    logs = {"broker": "/data/full/log/artemis.log"}
    probes = {"broker": hang, "election": refuse, "magazines": answer}
    broker, election = await StoreExamination(probes, addresses, logs).run()
    assert broker.what == "scheme://h does not answer: no answer within 0.01 s"
    assert "/data/full/log/artemis.log" in broker.advice
    assert election.what == "scheme://h does not answer: connection refused"
    assert (election.open, broker.open) == (1, 1)


@pytest.fixture
async def writer(installation: Installation) -> AsyncIterator[Writer]:
    async with Writer(installation.url, kind="worker") as writer:
        yield writer


@pytest.mark.parametrize("kind", SubscriptionType)
async def test_copies_of_a_time_that_postgresql_lost_are_shown_and_can_be_shoveled(
    installation: Installation, writer: Writer, terminal: Terminal, kind: SubscriptionType
) -> None:
    """PostgreSQL was restored to a time before these were published; the broker has their copies, message and all."""
    subscription = await installation.subscribe(kind)
    copies = [(await installation.publish(subscription, kind=kind))[0] for _ in range(3)]
    for table in ("deliveries", "messages"):
        await installation.rows(f"DELETE FROM {table}")
    assert await adopt(writer, copies) == (3, 0)
    since = datetime.now(UTC) - timedelta(hours=2)
    await installation.rows("UPDATE sidelined SET since = %s", since)

    code, report = await doctor(terminal, installation.url)
    (finding,) = report["findings"]
    assert (code, finding["part"], finding["count"], finding["under_way"]) == (0, "orphans", 3, True)
    assert datetime.fromisoformat(finding["since"]) == since
    (reference,) = finding["examples"]
    assert f"`rooms sideline shovel {reference} --reason orphan`" in finding["advice"]
    assert (await doctor(terminal, installation.url, "--repair"))[1]["findings"][0]["count"] == 3

    async with AsyncExitStack() as stack:
        magazines = await stack.enter_async_context(open_magazines(installation.url, farm="farm", client="test"))
        rows = Sidelines(writer)
        await Loader(rows, Shelves(magazines, rows)).run(lambda: True)
    steps = [
        Step(delivery_id=copy.delivery_id, subscription_id=subscription, generation=copy.generation, slot=None)
        for copy in copies
    ]
    await Shovels(writer).shovel(steps, most=3)
    for copy in copies:
        assert (await installation.delivery(copy))["state"] == State.QUEUED
        work = await installation.work("outbox", copy)
        assert work is not None
        (message,) = await installation.rows("SELECT payload FROM messages WHERE id = %s", copy.message_id)
        assert bytes(message["payload"]) == copy.payload
    assert await OrphanExamination(writer).run() == []


async def test_an_orphan_without_its_message_is_shown_apart(installation: Installation, writer: Writer) -> None:
    subscription = await installation.subscribe()
    copies = [copy for _ in range(2) for copy in await installation.publish(subscription, state=State.SIDELINED)]
    for copy in copies:
        await installation.rows(
            "INSERT INTO sidelined (room_id, id, subscription_id, generation, reason) VALUES (%s, %s, %s, 0, 'orphan')",
            copy.room_id, copy.delivery_id, subscription,
        )  # fmt: skip
    await installation.rows("DELETE FROM messages WHERE id = %s", copies[0].message_id)
    whole, bare = await OrphanExamination(writer).run()
    assert (whole.count, bare.count) == (1, 1)
    assert "shovel" in whole.advice
    assert "purge" in bare.advice
    assert "partition" in bare.what
