"""Test liveness, readiness and metrics."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from delivery.leadership.postgres import PostgresElection
from delivery.magazines import open_magazines
from rooms.api.readiness import BrokerHealth, BrokerUpGauge, Readiness, ReadinessReport, StoreHealth
from rooms.db.connection import open_connection
from rooms.db.queries.stats import CACHE_S, CachedStats
from rooms.db.readiness import PROOF_S as FRESH_WRITE_S
from rooms.db.readiness import RETRY_S, WriteCheck
from rooms.db.writer import LogWriter
from rooms.errors import MagazineUnavailableError, StorageRefusedError
from rooms.outages import Dependency
from tests.integration.rooms.api.conftest import Api
from tests.support.fake_broker import MemoryBroker
from tests.support.installation import until


async def test_ready_once_every_part_was_up_and_then_while_publishes_are_taken(api: Api) -> None:
    assert (await api.http.get("/health/live")).json() == {"status": "live"}
    answer = await api.http.get("/health/ready")
    assert (answer.status_code, answer.json()["status"]) == (503, "unready")
    assert answer.json()["degraded"] == ["worker", "upkeep", "leader"]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(leading(api))
        for kind in ("worker", "upkeep"):
            await stack.enter_async_context(LogWriter(api.url, kind=kind))
        answer = await api.http.get("/health/ready")
        parts = {"database": "up", "writes": "up", "worker": "up", "upkeep": "up", "leader": "up"}
        assert answer.json() == {
            "status": "ready",
            "parts": parts,
            "degraded": [],
            "leader_absent_seconds": 0,
        }
        assert answer.status_code == 200

    async def both_missed() -> bool:
        answer = await api.http.get("/health/ready")
        assert answer.status_code == 200
        return {"worker", "upkeep"} <= set(answer.json()["degraded"])

    await until(both_missed, "the end of the sessions to be seen")
    assert (await api.http.get("/health/ready")).json()["status"] == "degraded"
    assert not (
        await Readiness(
            api.services.engine, api.services.leader_health, writes=checks(api)
        ).report()
    ).ready


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_count_events_and_backlogs(api: Api) -> None:
    made = await api.room()
    await api.made(f"/rooms/{made['id']}/event-types", {"name": "made"})
    await api.subscription(made["id"])
    await api.subscription(made["id"], "pull", type="PULL")
    for _ in range(3):
        await api.publish(made["id"], "made", {})
    await api.sql("UPDATE outbox SET due_at = now() - interval '100 s' WHERE kind = 0 RETURNING 1")
    await api.sql(
        "INSERT INTO sidelined (room_id, id, subscription_id, generation, reason, since)"
        " SELECT room_id, id, subscription_id, 0, 'nacked', now() - interval '50 s' FROM deliveries"
    )
    answer = await api.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = samples(answer.text)
    assert found["rooms_publishes_total", (("outcome", "accepted"),)] == 3
    assert found["rooms_publish_latency_seconds_count", ()] == 3
    assert found["rooms_queue_depth", (("kind", "push"),)] == 3
    assert found["rooms_queue_depth", (("kind", "pull"),)] == 3
    assert 100 <= found["rooms_queue_oldest_seconds", (("kind", "push"),)] < 200
    assert 100 <= found["rooms_outbox_age_seconds", ()] < 200
    assert found["rooms_sidelined", (("reason", "nacked"),)] == 6
    assert 50 <= found["rooms_sideline_oldest_seconds", (("reason", "nacked"),)] < 150
    assert found["rooms_sideline_unloaded", ()] == 6
    assert found["rooms_processes_alive", (("kind", "api"),)] == 1
    assert found["rooms_database_up", ()] == 1
    assert found["rooms_leader_absent_seconds", ()] > 0


async def test_a_broker_outage_only_degrades(api: Api) -> None:
    broker = MemoryBroker()
    carriage = BrokerHealth(broker, iter(range(0, 1000, 2)).__next__)
    readiness = Readiness(
        api.services.engine, api.services.leader_health, carriage, writes=checks(api)
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(leading(api))
        for kind in ("worker", "upkeep"):
            await stack.enter_async_context(LogWriter(api.url, kind=kind))
        report = await readiness.report()
        assert (report.ready, report.degraded) == (False, ["relay"])
        await stack.enter_async_context(LogWriter(api.url, kind="relay"))
        broker.away()
        report = await readiness.report()
        assert (report.ready, report.degraded) == (True, ["broker"])
        broker.back()
        report = await readiness.report()
        assert (report.ready, report.degraded) == (True, [])
    assert [
        sample.value for family in BrokerUpGauge(up=False).collect() for sample in family.samples
    ] == [0.0]


async def test_an_outage_of_magazines_only_degrades(api: Api) -> None:
    """Check that an outage of the sideline's store is named, and leaves the process ready."""
    store = Store()
    health = StoreHealth(
        store.check, iter(range(0, 1000, 2)).__next__, dependency=Dependency.MAGAZINES
    )
    readiness = Readiness(
        api.services.engine, api.services.leader_health, magazines=health, writes=checks(api)
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(leading(api))
        for kind in ("worker", "upkeep"):
            await stack.enter_async_context(LogWriter(api.url, kind=kind))
        store.away = True
        report = await readiness.report()
        assert (report.ready, report.degraded) == (True, ["magazines"])
        store.away = False
        report = await readiness.report()
        assert (report.ready, report.degraded, report.up["magazines"]) == (True, [], True)


class Store:
    """Fake a store that fails or hangs."""

    def __init__(self) -> None:
        self.away = False
        self.asked = 0

    async def check(self) -> None:
        self.asked += 1
        if self.away:
            raise MagazineUnavailableError("away")


async def test_a_store_is_checked_once_a_second_for_all_callers() -> None:
    store, times = Store(), iter([0.0, 0.0, 0.5, 0.9, 1.0, 1.0])
    health = StoreHealth(store.check, times.__next__, dependency=Dependency.MAGAZINES)
    assert [await health.up() for _ in range(4)] == [True] * 4
    assert store.asked == 2


async def test_an_aerospike_outage_is_named_as_a_part(api: Api) -> None:
    """Check readiness with nothing at the store's address: it is named and its gauge is 0.

    A process whose database has the magazines has no such part.
    """
    assert "magazines" not in (await api.http.get("/health/ready")).json()["parts"]
    assert "rooms_magazines_up" not in (await api.http.get("/metrics")).text
    async with open_magazines(
        "aerospike://127.0.0.1:1/ns?retries=0", farm="farm", client="test"
    ) as magazines:
        with pytest.raises(MagazineUnavailableError):
            await magazines.check()
        health = StoreHealth(magazines.check, time.monotonic, dependency=Dependency.MAGAZINES)
        api.app.state.services = dataclasses.replace(
            api.services,
            magazine_health=health,
            readiness=Readiness(
                api.services.engine,
                api.services.leader_health,
                magazines=health,
                writes=checks(api),
            ),
        )
        answer = (await api.http.get("/health/ready")).json()
        assert (answer["parts"]["magazines"], "magazines" in answer["degraded"]) == ("down", True)
        assert samples((await api.http.get("/metrics")).text)["rooms_magazines_up", ()] == 0
        assert (await api.call("GET", "/status")).json()["health"]["parts"]["magazines"] == "down"


async def test_rows_of_the_outbox_are_counted_by_place(api: Api) -> None:
    made = await api.room()
    await api.made(f"/rooms/{made['id']}/event-types", {"name": "made"})
    await api.subscription(made["id"])
    for _ in range(4):
        await api.publish(made["id"], "made", {})
    await api.sql(
        "UPDATE outbox o SET kind = (array[0, 2, 4, 6])[n], due_at = now() - (array[1, 50, 900, -60])[n] * interval '1 s',"
        " claimed_until = now() + interval '1 min' FROM (SELECT id, row_number() OVER () AS n FROM outbox) v"
        " WHERE v.id = o.id RETURNING 1"
    )
    found = samples((await api.http.get("/metrics")).text)
    places = {key[1][0][1]: value for key, value in found.items() if key[0] == "rooms_outbox_rows"}
    assert places == {"here": 1, "to_send": 1, "sent": 1, "later": 1}
    assert found["rooms_queue_depth", (("kind", "push"),)] == 4
    assert found["rooms_queue_claimed", (("kind", "push"),)] == 3, "a relay's claim is no worker's"
    assert 50 <= found["rooms_outbox_age_seconds", ()] < 100
    assert 900 <= found["rooms_queue_oldest_seconds", (("kind", "push"),)] < 1000


async def test_an_installation_without_a_leader_is_ready_and_degraded(api: Api) -> None:
    async with AsyncExitStack() as stack:
        for kind in ("worker", "upkeep"):
            await stack.enter_async_context(LogWriter(api.url, kind=kind))
        async with leading(api):
            assert (await api.http.get("/health/ready")).json()["status"] == "ready"
        await until(lambda: reported_absent(api), "the leader to be missed")
        answer = await api.http.get("/health/ready")
        assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
        assert answer.json()["degraded"] == ["leader"]
        assert answer.json()["leader_absent_seconds"] > 0


def checks(api: Api) -> WriteCheck:
    return WriteCheck(api.services.engine, api.services.clock.monotonic)


REFUSING = """
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE disk_full USING MESSAGE = 'could not extend file'; END $$;
    CREATE TRIGGER refuse BEFORE INSERT ON {table} FOR EACH STATEMENT EXECUTE FUNCTION refuse();
"""


@asynccontextmanager
async def every_part(api: Api) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(leading(api))
        for kind in ("worker", "upkeep"):
            await stack.enter_async_context(LogWriter(api.url, kind=kind))
        yield


async def test_a_database_that_answers_and_takes_no_writes_is_not_ready(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that readiness names the part, and recovers by itself."""
    now_s = 1000.0
    writes = WriteCheck(api.services.engine, lambda: now_s)
    monkeypatch.setattr(api.services.readiness, "_writes", writes)
    async with every_part(api):
        assert (await api.http.get("/health/ready")).status_code == 200
        await api.sql(REFUSING.format(table="write_probes"))
        assert (await api.http.get("/health/ready")).status_code == 200, (
            "a write was proved to work just now"
        )
        now_s += FRESH_WRITE_S
        answer = await api.http.get("/health/ready")
        assert (answer.status_code, answer.json()["status"]) == (503, "unready")
        assert (answer.json()["degraded"], answer.json()["parts"]["database"]) == (["writes"], "up")
        await api.sql("DROP TRIGGER refuse ON write_probes")
        assert (await api.http.get("/health/ready")).status_code == 503, (
            "it is not tried at every probe"
        )
        now_s += RETRY_S
        assert (await api.http.get("/health/ready")).json()["status"] == "ready"


async def test_the_outcome_of_publishes_is_what_counts(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that commits replace test writes, and that a refused one triggers a test write at once."""
    now_s, tried = 1000.0, 0
    writes = api.services.readiness._writes
    monkeypatch.setattr(writes, "_monotonic", lambda: now_s)
    write = writes._write

    async def counted() -> None:
        nonlocal tried
        tried += 1
        await write()

    monkeypatch.setattr(writes, "_write", counted)
    room = (await api.room())["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    async with every_part(api):
        for _ in range(3):
            await api.publish(room, "made", {})
            assert (await api.http.get("/health/ready")).status_code == 200
            now_s += FRESH_WRITE_S / 2
        assert tried == 0
        for table in ("messages", "write_probes"):
            await api.sql(
                REFUSING.format(table=table).replace(
                    "CREATE FUNCTION", "CREATE OR REPLACE FUNCTION"
                )
            )
        with pytest.raises(StorageRefusedError):
            await api.publish(room, "made", {})
        answers = [await api.http.get("/health/ready") for _ in range(5)]
        assert {answer.status_code for answer in answers} == {503}
        assert tried == 1
        for table in ("messages", "write_probes"):
            await api.sql(f"DROP TRIGGER refuse ON {table}")
        await api.publish(room, "made", {})
        assert (await api.http.get("/health/ready")).status_code == 200
        assert tried == 1


async def test_a_backup_in_progress_keeps_no_installation_from_being_ready(api: Api) -> None:
    """Check readiness while a lock is held on every table and another session reads the row."""
    writes = checks(api)
    async with open_connection(api.url, name="backup") as backup, backup.transaction():
        await backup.execute("LOCK TABLE write_probes IN ACCESS SHARE MODE")
        assert await writes.is_writable()
    assert await api.sql("SELECT count(*) FROM write_probes") == [(1,)]


async def test_a_write_without_an_answer_counts_as_failed(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rooms.db.readiness._TIMEOUT_S", 0.2)
    writes = checks(api)
    async with open_connection(api.url, name="other") as other, other.transaction():
        await other.execute("INSERT INTO write_probes (id) VALUES (1)")
        assert not await writes.is_writable()


async def test_concurrent_probes_share_one_check(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    look = api.services.readiness._check

    async def counted() -> ReadinessReport:
        nonlocal looks
        looks += 1
        return await look()

    monkeypatch.setattr(api.services.readiness, "_check", counted)
    answers = await asyncio.gather(*(api.http.get("/health/ready") for _ in range(20)))
    assert {answer.status_code for answer in answers} == {503}
    assert looks == 1
    await api.http.get("/health/ready")
    assert looks == 2


async def reported_absent(api: Api) -> bool:
    return bool(await api.services.leader_health.absent_s())


@asynccontextmanager
async def leading(api: Api) -> AsyncIterator[None]:
    """Run a leader that the API knows of."""
    async with (
        PostgresElection(api.url, member="leader", clock=api.services.clock) as election,
        election.join(["upkeep/jobs"]),
    ):

        async def known() -> bool:
            return not await reported_absent(api)

        await until(known, "the leader to be known")
        yield


async def test_backlogs_are_counted_at_intervals(api: Api) -> None:
    now_s = 1000.0
    gauges = CachedStats(api.services.engine, lambda: now_s)
    first = await gauges.counts()
    now_s += CACHE_S - 1
    assert await gauges.counts() is first
    now_s += 1
    assert await gauges.counts() is not first


@pytest.mark.parametrize(
    "path", ["/metrics", "/health/live", "/health/ready", "/schema", "/schema/openapi.json"]
)
async def test_no_key_is_needed(api: Api, path: str) -> None:
    assert (await api.http.get(path)).status_code in {200, 503}
