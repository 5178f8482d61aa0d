"""The doctor: findings on stores that were changed by hand, and their repair.

Oracle: after a repair a second check finds nothing, and every unfinished delivery is in one place.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from delivery.doctor.checks import (
    REPAIR_CRASHES,
    SUSPECT_CRASHES,
    BrokerQueueCheck,
    ClaimCheck,
    DeliveryCheck,
    DoctorFinding,
    SidelineCheck,
)
from delivery.magazines import open_magazines
from delivery.sideline.audit import SidelineAudit
from delivery.sideline.loader import SidelineLoader
from delivery.sideline.magazines import SidelineMagazineCache, sideline_magazine_name
from rooms.clock import SystemClock
from rooms.db.queue.integrity import IntegrityCheck
from rooms.db.queue.orphans import CrashLoops
from rooms.db.sideline.entries import SidelineEntries
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId
from rooms.domain.magazine import Entry
from rooms.domain.state_machine import State, SubscriptionType
from rooms.domain.work_location import WorkLocation, relayed_mode
from tests.support.cli_runner import Terminal
from tests.support.fake_broker import MemoryBroker
from tests.support.installation import Installation, ago, installed, now_ms
from tests.support.sentinel import put_sentinel

RELAYED = relayed_mode(lookahead_ms=3_600_000)


async def examine(writer: LogWriter, *, mend: bool = False) -> dict[str, tuple[int, int]]:
    """Return counts and repaired counts by description."""
    found = await DeliveryCheck(IntegrityCheck(writer), lambda: None).run(repair=mend)
    return {finding.description: (finding.count, finding.repaired) for finding in found}


async def places(installation: Installation, copy: DeliveryTask) -> list[str]:
    return [
        table
        for table in ("outbox", "held", "leases", "sidelined")
        if await installation.work(table, copy)
    ]


async def lease(installation: Installation, copy: DeliveryTask, *, generation: int = 0) -> None:
    await installation.rows(
        "INSERT INTO leases (room_id, id, subscription_id, generation, until) VALUES (%s, %s, %s, %s, now() + interval '1 h')",
        copy.room_id, copy.delivery_id, copy.subscription_id, generation,
    )  # fmt: skip


async def hold(installation: Installation, copy: DeliveryTask) -> None:
    await installation.rows(
        "INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason) VALUES (%s, %s, %s, 4, 0, 'paused')",
        copy.room_id, copy.delivery_id, copy.subscription_id,
    )  # fmt: skip


async def test_consistent_deliveries_are_not_changed(
    installation: Installation, writer: LogWriter
) -> None:
    push = await installation.subscribe()
    pull = await installation.subscribe(SubscriptionType.PULL)
    (queued,) = await installation.publish(push)
    await installation.queue(queued)
    (held,) = await installation.publish(push, state=State.HELD)
    await hold(installation, held)
    (leased,) = await installation.publish(pull, kind=SubscriptionType.PULL, state=State.LEASED)
    await lease(installation, leased)
    await installation.publish(push, state=State.DELIVERED)
    assert await examine(writer, mend=True) == {}
    for copy, state in ((queued, "queued"), (held, "held"), (leased, "leased")):
        assert (await installation.delivery(copy))["state"] == state
        assert len(await places(installation, copy)) == 1


@pytest.mark.parametrize("kind", SubscriptionType)
async def test_a_queued_delivery_without_work_is_queued_again(
    installation: Installation, writer: LogWriter, kind: SubscriptionType
) -> None:
    (copy,) = await installation.publish(await installation.subscribe(kind), kind=kind, attempt=2)
    (reported,) = (await examine(writer)).values()
    assert reported == (1, 0)
    assert await places(installation, copy) == []
    assert list((await examine(writer, mend=True)).values()) == [(1, 1)]
    row = await installation.delivery(copy)
    work = await installation.work("outbox", copy)
    assert work is not None
    assert (row["state"], row["generation"], row["attempt"]) == ("queued", 1, 2)
    assert (work["generation"], work["attempt"], work["kind"]) == (
        1,
        2,
        int(kind is SubscriptionType.PULL),
    )
    assert await installation.kinds(copy) == ["restored"]
    assert await examine(writer) == {}


async def test_work_of_another_generation_is_moved_to_the_deliverys(
    installation: Installation, writer: LogWriter
) -> None:
    (copy,) = await installation.publish(await installation.subscribe(), generation=3, attempt=1)
    await installation.queue(copy)
    await installation.rows(
        "UPDATE outbox SET generation = 1, claimed_until = now() + interval '1 h'"
    )
    assert list((await examine(writer, mend=True)).values()) == [(1, 1)]
    work = await installation.work("outbox", copy)
    assert work is not None
    assert (work["generation"], work["attempt"]) == (4, 1)
    assert work["claimed_until"] < ago()
    assert (await installation.delivery(copy))["generation"] == 4
    assert await examine(writer) == {}


async def test_a_delivery_with_two_work_rows_keeps_the_one_of_its_state(
    installation: Installation, writer: LogWriter
) -> None:
    push = await installation.subscribe()
    copies = {}
    for state in (State.QUEUED, State.HELD, State.LEASED, State.DELIVERED):
        (copies[state],) = await installation.publish(push, state=state)
        await installation.queue(copies[state])
        await hold(installation, copies[state])
        await lease(installation, copies[state])
    assert list((await examine(writer)).values()) == [(4, 0)]
    assert list((await examine(writer, mend=True)).values()) == [(4, 4)]
    assert {state: await places(installation, copy) for state, copy in copies.items()} == {
        State.QUEUED: ["outbox"],
        State.HELD: ["held"],
        State.LEASED: ["leases"],
        State.DELIVERED: [],
    }
    assert await examine(writer) == {}


async def test_held_leased_and_sidelined_deliveries_get_their_rows(
    installation: Installation, writer: LogWriter
) -> None:
    push = await installation.subscribe()
    copies = {}
    for state in (State.HELD, State.LEASED, State.SIDELINED):
        (copies[state],) = await installation.publish(push, state=state)
    assert list((await examine(writer, mend=True)).values()) == [(3, 3)]
    assert {state: await places(installation, copy) for state, copy in copies.items()} == {
        State.HELD: ["held"],
        State.LEASED: ["leases"],
        State.SIDELINED: ["sidelined"],
    }
    lease_row = await installation.work("leases", copies[State.LEASED])
    assert lease_row is not None
    assert lease_row["until"] <= ago(-1)  # it has ended: upkeep takes it from there
    assert await examine(writer) == {}


async def test_a_delivery_that_cannot_continue_ends_with_its_reason(
    installation: Installation, writer: LogWriter
) -> None:
    gone = await installation.subscribe(status="deleted")
    (cancelled,) = await installation.publish(gone)
    (orphan,) = await installation.publish(await installation.subscribe())
    await installation.rows("DELETE FROM messages WHERE id = %s", orphan.message_id)
    assert list((await examine(writer, mend=True)).values()) == [(2, 2)]
    found = [await installation.delivery(copy) for copy in (cancelled, orphan)]
    assert [(row["state"], row["reason"]) for row in found] == [
        ("cancelled", "subscription_deleted"),
        ("sidelined", "orphan"),
    ]
    assert await places(installation, orphan) == ["sidelined"]
    assert await examine(writer) == {}


async def test_work_without_a_delivery_is_deleted(
    installation: Installation, writer: LogWriter
) -> None:
    (copy,) = await installation.publish(await installation.subscribe())
    await installation.queue(copy)
    await lease(installation, copy)
    await installation.rows("DELETE FROM deliveries")
    assert await examine(writer) == {
        "rows of outbox without a delivery": (1, 0),
        "rows of leases without a delivery": (1, 0),
    }
    assert sum(mended for _, mended in (await examine(writer, mend=True)).values()) == 2
    assert await places(installation, copy) == []


async def test_a_locked_delivery_is_left_for_the_next_run(
    installation: Installation, writer: LogWriter
) -> None:
    (copy,) = await installation.publish(await installation.subscribe())
    async with installed(installation.url) as other, other.connection.transaction():
        await other.rows("SELECT FROM deliveries WHERE id = %s FOR UPDATE", copy.delivery_id)
        assert list((await examine(writer, mend=True)).values()) == [(1, 0)]
    assert list((await examine(writer, mend=True)).values()) == [(1, 1)]


async def broker_findings(
    writer: LogWriter, broker: MemoryBroker, *, mend: bool = False
) -> list[DoctorFinding]:
    examination = BrokerQueueCheck(writer, broker, SystemClock(), lambda: None, settle_s=0)
    return await examination.run(repair=mend)


async def test_an_emptied_broker_is_sent_everything_again(database: str) -> None:
    async with AsyncExitStack() as stack:
        installation = await stack.enter_async_context(installed(database, RELAYED))
        writer = await stack.enter_async_context(
            LogWriter(database, kind="doctor", broker_mode=RELAYED)
        )
        broker = MemoryBroker()
        copies = []
        for _ in range(3):
            copies += await installation.publish(await installation.subscribe())
        await installation.queue(*copies)
        await installation.rows("UPDATE outbox SET kind = %s", int(WorkLocation.PUSH_AT_BROKER))
        assert [finding.count for finding in await broker_findings(writer, broker)] == [3]
        await put_sentinel(broker)
        assert [
            (finding.count, finding.repaired) for finding in await broker_findings(writer, broker)
        ] == [(3, 0)]
        assert [
            finding.open_count for finding in await broker_findings(writer, broker, mend=True)
        ] == [0]
        rows = await installation.rows("SELECT kind, generation FROM outbox")
        assert [(row["kind"], row["generation"]) for row in rows] == [
            (WorkLocation.PUSH_TO_RELAY, 1)
        ] * 3
        assert await broker_findings(writer, broker) == []


async def sent(
    installation: Installation, subscription: SubscriptionId, count: int
) -> list[DeliveryTask]:
    """Return deliveries to pull whose copies the broker has."""
    copies = []
    for _ in range(count):
        copies += await installation.publish(subscription, kind=SubscriptionType.PULL)
    await installation.queue(*copies)
    await installation.rows(
        "UPDATE outbox SET kind = %s WHERE subscription_id = %s",
        int(WorkLocation.PULL_AT_BROKER), subscription,
    )  # fmt: skip
    return copies


async def generations(installation: Installation, copies: list[DeliveryTask]) -> list[int]:
    return [(await installation.delivery(copy))["generation"] for copy in copies]


class QuickRelayBroker(MemoryBroker):
    """Lose its messages, and have them again before the repair ends, as far as the rows say."""

    def __init__(self, installation: Installation) -> None:
        super().__init__()
        self._installation = installation

    async def put_sentinel(self, prepared: str) -> bool:
        """Put the mark there, when the relay has sent everything and workers have taken it."""
        await self._installation.rows("UPDATE outbox SET kind = kind + 2 WHERE kind IN (2, 3)")
        return await super().put_sentinel(prepared)


async def test_an_emptied_broker_is_sent_nothing_twice(database: str) -> None:
    async with AsyncExitStack() as stack:
        installation = await stack.enter_async_context(installed(database, RELAYED))
        writer = await stack.enter_async_context(
            LogWriter(database, kind="doctor", broker_mode=RELAYED)
        )
        copies = await sent(
            installation, await installation.subscribe(SubscriptionType.PULL), count=3
        )
        broker = QuickRelayBroker(installation)
        (found,) = await broker_findings(writer, broker, mend=True)
        assert (found.count, found.repaired) == (3, 3)
        assert await broker.has_sentinel()
        assert await broker.depth(None) == 0
        assert await generations(installation, copies) == [1, 1, 1]


class ScriptedDepthsBroker(MemoryBroker):
    """Answer with given depths, the last of a queue for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.depths: dict[SubscriptionId | None, list[int]] = {}
        self.on_depth: Callable[[], Awaitable[object]] | None = None

    async def depth(self, subscription: SubscriptionId | None) -> int:
        """Return the next depth."""
        if self.on_depth is not None:
            on_depth, self.on_depth = self.on_depth, None
            await on_depth()
        depths = self.depths[subscription]
        return depths.pop(0) if len(depths) > 1 else depths[0]


async def test_only_queues_that_lack_messages_are_sent_them_again(database: str) -> None:
    """A queue that is short by one for a moment, between two readings, lacks nothing.

    Nor does the lacking queue lack what is sent to it after the count.
    """
    async with AsyncExitStack() as stack:
        installation = await stack.enter_async_context(installed(database, RELAYED))
        writer = await stack.enter_async_context(
            LogWriter(database, kind="doctor", broker_mode=RELAYED)
        )
        lacking, well = [await installation.subscribe(SubscriptionType.PULL) for _ in range(2)]
        lost, kept = await sent(installation, lacking, 3), await sent(installation, well, 2)
        later: list[DeliveryTask] = []
        broker = ScriptedDepthsBroker()
        await broker.create_queues([lacking, well])
        await put_sentinel(broker)
        broker.depths = {lacking: [1], well: [2, 1]}

        async def send_more() -> None:
            later.extend(await sent(installation, lacking, 1))

        broker.on_depth = send_more
        (found,) = await broker_findings(writer, broker, mend=True)
        assert (found.count, found.repaired, list(found.examples)) == (2, 2, [lacking])
        assert await generations(installation, lost) == [1, 1, 1]
        assert await generations(installation, kept) == [0, 0]
        assert await generations(installation, later) == [0]


async def test_queues_without_a_subscription_are_deleted(
    installation: Installation, writer: LogWriter
) -> None:
    broker = MemoryBroker()
    await put_sentinel(broker)
    alive = await installation.subscribe(SubscriptionType.PULL)
    missing = SubscriptionId(installation.ids.generate(installation.room, now_ms()))
    await broker.create_queues([alive, missing])
    (found,) = await broker_findings(writer, broker)
    assert (found.count, list(found.examples)) == (1, [missing])
    assert [finding.open_count for finding in await broker_findings(writer, broker, mend=True)] == [
        0
    ]
    assert list(await broker.list_queues()) == [alive]


async def test_an_emptied_magazine_is_filled_again(
    installation: Installation, writer: LogWriter
) -> None:
    async with open_magazines(installation.url, farm="farm", client="test") as magazines:
        rows = SidelineEntries(writer)
        shelves = SidelineMagazineCache(magazines, rows)
        loader = SidelineLoader(rows, shelves)

        def audit() -> SidelineAudit:
            return SidelineAudit(
                rows, SidelineMagazineCache(magazines, rows), SystemClock(), on_lost=lambda _: None
            )

        examination = SidelineCheck(audit, loader)
        subscription = await installation.subscribe()
        for _ in range(4):
            await installation.publish(subscription, state=State.SIDELINED)
        await DeliveryCheck(IntegrityCheck(writer), lambda: None).run(repair=True)
        await loader.run(lambda: True)
        assert await examination.run(repair=False) == []
        magazine = await magazines.open(sideline_magazine_name(subscription))
        entries = await magazine.peek(10)
        await magazine.delete([stored.slot for stored in entries[:3]])
        (found,) = await examination.run(repair=False)
        assert (found.count, found.repaired, found.open_count) == (3, 0, 3)
        (found,) = await examination.run(repair=True)
        assert (found.count, found.open_count) == (3, 0)
        assert len(await magazine.peek(10)) == 4
        assert await examination.run(repair=False) == []

        orphans = [Entry(id=f"orphan-{n}", body=b"{}") for n in range(3)]
        await magazine.load(orphans)
        assert (
            await examination.run(repair=False) == []
        )  # their loader may be about to write the rows
        await installation.rows(
            "UPDATE magazine_entries SET loaded_at = loaded_at - interval '1 h'"
        )
        assert [finding.count for finding in await examination.run(repair=False)] == [3]
        assert [finding.open_count for finding in await examination.run(repair=True)] == [0]
        assert len(await magazine.peek(10)) == 4


def reported(terminal: Terminal, database: str, *options: str) -> tuple[int, Any]:
    result = terminal.run("--json", "doctor", *options, DATABASE_URL=database)
    return result.exit_code, json.loads(result.stdout)


async def test_the_command_reports_and_repairs(installation: Installation, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    (copy,) = await installation.publish(await installation.subscribe())
    code, report = await asyncio.to_thread(reported, terminal, installation.url)
    assert code == 1
    assert (report["open"], report["findings"][0]["examples"]) == (1, [copy.delivery_id])
    shown = await asyncio.to_thread(terminal.run, "doctor", DATABASE_URL=installation.url)
    assert "`rooms doctor --repair` repairs them" in shown.stdout
    code, report = await asyncio.to_thread(reported, terminal, installation.url, "--repair")
    assert (code, report["open"], report["findings"][0]["mended"]) == (0, 0, 1)
    shown = await asyncio.to_thread(terminal.run, "doctor", DATABASE_URL=installation.url)
    assert (shown.exit_code, shown.stdout) == (0, "database, broker and magazines agree\n")
    lost = await asyncio.to_thread(
        terminal.run, "doctor", DATABASE_URL="postgresql://unknown@127.0.0.1:1/none"
    )
    assert lost.exit_code == 1
    assert "PostgreSQL does not answer" in lost.stderr
    assert "make run" in lost.stderr


async def test_crash_loops_are_reported_and_sidelined(
    installation: Installation, writer: LogWriter
) -> None:
    suspect, hopeless, fresh = [
        copy
        for _ in range(3)
        for copy in await installation.publish(await installation.subscribe())
    ]
    await installation.queue(suspect, hopeless, fresh)
    for copy, deaths in (
        (suspect, REPAIR_CRASHES - 1),
        (hopeless, REPAIR_CRASHES),
        (fresh, SUSPECT_CRASHES - 1),
    ):
        await installation.rows(
            "UPDATE outbox SET abandoned = %s WHERE id = %s RETURNING 1", deaths, copy.delivery_id
        )
    examination = ClaimCheck(CrashLoops(writer))
    reported = await examination.run(repair=False)
    assert [(one.examples, one.open_count) for one in reported] == [
        ([suspect.delivery_id], 0),
        ([hopeless.delivery_id], 1),
    ]
    assert [(one.count, one.repaired) for one in await examination.run(repair=True)] == [
        (1, 0),
        (1, 1),
    ]
    assert [one.examples for one in await examination.run(repair=True)] == [[suspect.delivery_id]]
    row = await installation.delivery(hopeless)
    assert (row["state"], row["reason"]) == ("sidelined", "stuck")
    assert "again and again" in row["last_error"]
    assert await places(installation, hopeless) == ["sidelined"]
    assert (await installation.journey(hopeless))[-1]["detail"] == "stuck"
    assert await places(installation, suspect) == await places(installation, fresh) == ["outbox"]
    assert await examine(writer) == {}
