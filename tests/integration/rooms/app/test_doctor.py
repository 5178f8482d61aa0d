"""The doctor beside running processes: its choice of stores, and unavailable stores.

A repair is refused unless all stores answer.
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

from delivery.doctor.checks import StoreCheck
from delivery.doctor.orphans import OrphanCheck
from delivery.magazines import open_magazines
from delivery.sideline.loader import SidelineLoader
from delivery.sideline.magazines import SidelineMagazineCache
from rooms.backends import DATABASE, Backends, ProcessRecord
from rooms.db.connection import open_connection
from rooms.db.processes import heartbeat
from rooms.db.queue.orphans import create_orphan_rows
from rooms.db.sideline.entries import EntryRef, SidelineEntries
from rooms.db.sideline.shovel import ShovelQueries
from rooms.db.writer import LogWriter
from rooms.domain.state_machine import State, SubscriptionType
from rooms.errors import BrokerUnavailableError
from tests.support.cli_runner import Terminal
from tests.support.installation import Installation

NOWHERE = "127.0.0.1:1"
AEROSPIKE = f"aerospike://{NOWHERE}/ns"
EMBEDDED = Backends(
    broker=DATABASE, election=DATABASE, magazines=DATABASE, farm="rooms", client="default"
)


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    return Terminal(tmp_path)


async def doctor(
    terminal: Terminal, url: str, *options: str, **environment: str
) -> tuple[int, dict[str, Any]]:
    """Return exit code and report; for a refused command the error."""
    environment = {"DATABASE_URL": url, **environment}
    result = await asyncio.to_thread(terminal.run, "--json", "doctor", *options, **environment)
    return result.exit_code, json.loads(result.stdout or result.stderr)


async def runs(url: str, kind: str, **differing: str) -> None:
    """Record a process of this kind."""
    backends = dataclasses.replace(EMBEDDED, **differing)
    process = ProcessRecord(name=kind, kind=kind, host="h", pid=7, running=True, backends=backends)
    async with open_connection(url, name="test") as connection:
        await heartbeat(connection, process)


async def lost_one(installation: Installation) -> Any:
    """Create a delivery without work, which a repair would queue again."""
    (copy,) = await installation.publish(await installation.subscribe())
    return copy


async def untouched(installation: Installation, copy: Any) -> bool:
    return (
        await installation.work("outbox", copy) is None
        and (await installation.delivery(copy))["generation"] == 0
    )


async def test_the_doctor_checks_the_stores_of_the_running_processes(
    installation: Installation, terminal: Terminal
) -> None:
    """Run it without MAGAZINE_URL: in PostgreSQL's magazines every entry would be missing."""
    await runs(installation.url, "serve", magazines=AEROSPIKE)
    code, report = await doctor(terminal, installation.url)
    (finding,) = report["findings"]
    assert (code, finding["part"], finding["away"]) == (1, "magazines", True)
    assert finding["what"].startswith(f"{AEROSPIKE} does not answer")


async def test_a_repair_is_refused_while_a_store_is_unavailable(
    installation: Installation, terminal: Terminal
) -> None:
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


async def test_other_checks_run_while_a_store_is_unavailable(
    installation: Installation, terminal: Terminal
) -> None:
    await lost_one(installation)
    code, report = await doctor(terminal, installation.url, BROKER_URL=f"stomp://u:p@{NOWHERE}")
    assert code == 1
    assert [finding["part"] for finding in report["findings"]] == ["deliveries", "broker"]
    shown = await asyncio.to_thread(
        terminal.run, "doctor", DATABASE_URL=installation.url, BROKER_URL=f"stomp://u:p@{NOWHERE}"
    )
    assert "broker could not be checked" in shown.stdout
    assert (
        "1 not repaired: `rooms doctor --repair` repairs them once every store answers"
        in shown.stdout
    )


@pytest.mark.parametrize(
    ("differing", "environment", "both"),
    [
        (
            {"broker": "stomp://***@a:1"},
            {"BROKER_URL": "stomp://u:s3cret@b:1"},
            ("stomp://***@a:1", "stomp://***@b:1"),
        ),
        ({"broker": "stomp://***@a:1"}, {}, ("BROKER_URL is not set", "stomp://***@a:1")),
        ({}, {"MAGAZINE_URL": AEROSPIKE}, (AEROSPIKE, "postgresql")),
        (
            {"magazines": AEROSPIKE},
            {"ROOMS_FARM": "other"},
            ("ROOMS_FARM is other here", "and rooms in the running processes (serve 7 on h)"),
        ),
    ],
)
async def test_an_environment_that_differs_from_running_processes_is_refused(
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


async def test_no_repair_during_a_change_of_stores(
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


async def test_a_store_that_hangs_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    async def refuse() -> None:
        raise BrokerUnavailableError("connection refused")

    async def answer() -> None:
        return

    monkeypatch.setattr("delivery.doctor.checks.ANSWER_TIMEOUT_S", 0.01)
    addresses = dict.fromkeys(("broker", "election", "magazines"), "scheme://h")
    logs = {"broker": "/data/full/log/artemis.log"}
    probes = {"broker": hang, "election": refuse, "magazines": answer}
    broker, election = await StoreCheck(probes, addresses, logs).run()
    assert broker.description == "scheme://h does not answer: no answer within 0.01 s"
    assert "/data/full/log/artemis.log" in broker.advice
    assert election.description == "scheme://h does not answer: connection refused"
    assert (election.open_count, broker.open_count) == (1, 1)


@pytest.fixture
async def writer(installation: Installation) -> AsyncIterator[LogWriter]:
    async with LogWriter(installation.url, kind="worker") as writer:
        yield writer


@pytest.mark.parametrize("kind", SubscriptionType)
async def test_orphans_of_a_restored_database_are_reported_and_can_be_shoveled(
    installation: Installation, writer: LogWriter, terminal: Terminal, kind: SubscriptionType
) -> None:
    """Restore PostgreSQL to a time before the publish; the broker has the messages."""
    subscription = await installation.subscribe(kind)
    copies = [(await installation.publish(subscription, kind=kind))[0] for _ in range(3)]
    for table in ("deliveries", "messages"):
        await installation.rows(f"DELETE FROM {table}")
    assert await create_orphan_rows(writer, copies) == (3, 0)
    since = datetime.now(UTC) - timedelta(hours=2)
    await installation.rows("UPDATE sidelined SET since = %s", since)

    code, report = await doctor(terminal, installation.url)
    (finding,) = report["findings"]
    assert (code, finding["part"], finding["count"], finding["under_way"]) == (
        0,
        "orphans",
        3,
        True,
    )
    assert datetime.fromisoformat(finding["since"]) == since
    (reference,) = finding["examples"]
    assert f"`rooms sideline shovel {reference} --reason orphan`" in finding["advice"]
    assert (await doctor(terminal, installation.url, "--repair"))[1]["findings"][0]["count"] == 3

    async with AsyncExitStack() as stack:
        magazines = await stack.enter_async_context(
            open_magazines(installation.url, farm="farm", client="test")
        )
        rows = SidelineEntries(writer)
        await SidelineLoader(rows, SidelineMagazineCache(magazines, rows)).run(lambda: True)
    steps = [
        EntryRef(
            delivery_id=copy.delivery_id,
            subscription_id=subscription,
            generation=copy.generation,
            slot=None,
        )
        for copy in copies
    ]
    await ShovelQueries(writer).shovel(steps, max_shovels=3)
    for copy in copies:
        assert (await installation.delivery(copy))["state"] == State.QUEUED
        work = await installation.work("outbox", copy)
        assert work is not None
        (message,) = await installation.rows(
            "SELECT payload FROM messages WHERE id = %s", copy.message_id
        )
        assert bytes(message["payload"]) == copy.payload
    assert await OrphanCheck(writer).run() == []


async def test_an_orphan_without_its_message_is_a_separate_finding(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    copies = [
        copy
        for _ in range(2)
        for copy in await installation.publish(subscription, state=State.SIDELINED)
    ]
    for copy in copies:
        await installation.rows(
            "INSERT INTO sidelined (room_id, id, subscription_id, generation, reason) VALUES (%s, %s, %s, 0, 'orphan')",
            copy.room_id, copy.delivery_id, subscription,
        )  # fmt: skip
    await installation.rows("DELETE FROM messages WHERE id = %s", copies[0].message_id)
    whole, bare = await OrphanCheck(writer).run()
    assert (whole.count, bare.count) == (1, 1)
    assert "shovel" in whole.advice
    assert "purge" in bare.advice
    assert "partition" in bare.description
