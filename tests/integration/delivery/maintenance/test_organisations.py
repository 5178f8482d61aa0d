"""Test deleting an organisation: nothing that names it is left but its journal and its usage."""

import asyncio
import dataclasses
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from delivery.analytics.export.exporter import Exporter
from delivery.handlers.tasks import QueueDeletions, QueueTasks
from delivery.leadership.postgres import PostgresElection
from delivery.maintenance import organisations
from delivery.maintenance.deletions import DeleteJob
from delivery.maintenance.jobs import JobHandler, JobRunner
from delivery.maintenance.organisations import DeleteOrganisationJob
from delivery.maintenance.service import TaskIntervals, run_tasks
from delivery.maintenance.task import ShouldContinue
from delivery.maintenance.usage import usage_counter
from rooms.db.connection import transaction
from rooms.db.jobs import organisations as records
from rooms.db.jobs.delete import DeleteQueries
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.db.journal import verify_chain
from rooms.db.writer import LogWriter
from rooms.domain.ids import OrganisationId, first_id
from rooms.domain.job import JobKind
from rooms.metrics import Metrics
from tests.integration.rooms.api.conftest import Api
from tests.support.installation import until

KEPT = {"journal", "journal_heads", "usage_hours", "activity_minutes"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agency:
    """Name an organisation that has something of everything, and what others have beside it."""

    id: OrganisationId
    their_room: int
    """A room of another organisation, with a subscription of each."""
    their_subscription: str
    its_subscription: str
    its_room: int


async def found_agency(api: Api) -> Agency:
    """Create an organisation that owns, subscribes, publishes, and is named by others."""
    made = await api.made("/organisations", {"name": "agency"}, "platform")
    key = await api.made(
        f"/organisations/{made['id']}/keys",
        {"name": "all", "scopes": ["admin", "platform"]},
        "platform",
    )
    api.keys["agency"] = key["key"]
    theirs = (await api.room("theirs"))["id"]
    await api.made(f"/rooms/{theirs}/event-types", {"name": "made"})
    for kind in ("publish", "subscribe"):
        await api.made(f"/rooms/{theirs}/grants", {"organisation_id": "agency", "kind": kind})
    their_subscription = await api.subscription(theirs, "ours", type="PULL")
    its_subscription = await api.made(
        f"/rooms/{theirs}/subscriptions", {"name": "its", "type": "PULL"}, "agency"
    )
    its_room = (await api.room("its", "agency"))["id"]
    await api.made(f"/rooms/{its_room}/event-types", {"name": "made"}, "agency")
    await api.made(
        f"/rooms/{its_room}/grants", {"organisation_id": "default", "kind": "subscribe"}, "agency"
    )
    await api.made(f"/rooms/{its_room}/subscriptions", {"name": "guest", "type": "PULL"})
    await api.made("/queues", {"name": "handled"}, "agency")
    await api.publish(theirs, "made", 1)
    # An operator of the agency suspended a subscription of others: their history names it.
    await api.sql(
        "INSERT INTO subscription_history (room_id, subscription_id, action, status, organisation_id, snapshot)"
        " VALUES (%s, %s, 'suspended', 'suspended', %s, '{}')",
        theirs, their_subscription["id"], made["id"],
    )  # fmt: skip
    await api.sql(
        "INSERT INTO analysis_rows (organisation_id, finding, number, run_id, rooms, subscriptions, body)"
        " VALUES (%s, 'lost', 1, 1, '{}', '{}', '{}')",
        made["id"],
    )
    return Agency(
        id=OrganisationId(made["id"]),
        their_room=theirs,
        their_subscription=their_subscription["id"],
        its_subscription=its_subscription["id"],
        its_room=its_room,
    )


async def ask(api: Api, agency: Agency) -> str:
    """Request the deletion; its job, as old as if nothing were under way any more."""
    answer = await api.call(
        "DELETE", f"/organisations/{agency.id}", "platform", params={"confirm": "agency"}
    )
    assert answer.status_code == 202, answer.text
    return str(answer.json()["job_id"])


async def age_jobs(api: Api) -> None:
    await api.sql("UPDATE jobs SET created_at = now() - interval '1 min'")


class Maintenance:
    """Run deletions as a maintenance process does; a `successor` is another such process."""

    def __init__(self, api: Api, writer: LogWriter) -> None:
        self._api = api
        self._queue = JobQueue(writer)
        counter = usage_counter(api.services.engine)
        self._deletions = DeleteJob(self._queue, DeleteQueries(writer), count_usage=counter)
        self.handlers = dict(self._deletions.handlers())
        self.of_organisations = DeleteOrganisationJob(
            api.services.engine,
            self._queue,
            api.services.notifier,
            api.services.clock,
            random.getrandbits,
            settle_s=5.0,
            batch=1,
            count_usage=counter,
        )
        self.handler: JobHandler = self.of_organisations.handlers()[JobKind.DELETE_ORGANISATION]
        self.queues = QueueDeletions(api.services.engine, api.services.magazines, self._queue)

    async def open_jobs(self) -> list[OpenJob]:
        return await self._queue.fetch_open({JobKind.DELETE_ORGANISATION})

    async def run_children(self) -> None:
        """Run every deletion but those of organisations, with nothing left under way."""
        await age_jobs(self._api)
        await self.queues.run(lambda: True)
        await JobRunner(self._queue, self.handlers, poll_s=0.01).run(lambda: True)

    async def run(self) -> None:
        """Run every job until none is open."""
        kinds = {*self.handlers, JobKind.DELETE_ORGANISATION, JobKind.DELETE_QUEUE}
        async with asyncio.timeout(60):
            while await self._queue.fetch_open(kinds):
                await self.run_round()

    async def run_round(self) -> None:
        """Run every job until each must wait for something."""
        handlers = {**self.handlers, JobKind.DELETE_ORGANISATION: self.handler}
        await age_jobs(self._api)
        await self.queues.run(lambda: True)
        await JobRunner(self._queue, handlers, poll_s=0.01).run(lambda: True)


@pytest.fixture
async def maintenance(api: Api, writer: LogWriter) -> Maintenance:
    return Maintenance(api, writer)


async def rows_naming(api: Api, identity: str) -> dict[str, int]:
    """Count the rows of each table with this id in a column of the type uuid, by table."""
    columns = await api.sql(
        "SELECT c.table_name::text, c.column_name::text FROM information_schema.columns c"
        " JOIN information_schema.tables t USING (table_schema, table_name)"
        " JOIN pg_class p ON p.relname = c.table_name AND NOT p.relispartition"
        " WHERE c.table_schema = 'public' AND t.table_type = 'BASE TABLE' AND c.udt_name = 'uuid'"
    )
    assert ("rooms", "organisation_id") in columns
    found: dict[str, int] = {}
    for table, column in columns:
        ((count,),) = await api.sql(
            f"SELECT count(*) FROM {table} WHERE {column} = %s",
            identity,
        )
        if count:
            found[table] = found.get(table, 0) + count
    return found


async def job_of(api: Api, identity: str) -> dict[str, Any]:
    answer = await api.call("GET", f"/jobs/{identity}", "platform")
    if answer.status_code == 403:
        ((state, done, total, error),) = await api.sql(
            "SELECT state, done, total, error FROM jobs WHERE id = %s", identity
        )
        return {"state": state, "done": done, "total": total, "error": error}
    found: dict[str, Any] = answer.json()
    return found


async def test_nothing_but_journal_and_usage_name_a_deleted_organisation(
    api: Api, maintenance: Maintenance
) -> None:
    agency = await found_agency(api)
    assert {"rooms", "subscriptions", "grants", "queues", "api_keys", "analysis_rows"} < set(
        await rows_naming(api, agency.id)
    )
    # In its own room it knows of each delivery by the minute; elsewhere its suspension hides them.
    own = f"/rooms/{agency.its_room}"
    await api.made(f"{own}/subscriptions", {"name": "own", "type": "PULL"}, "agency")
    message = {"event_type": "made", "payload": 1}
    answer = await api.call("POST", f"{own}/messages", "agency", json=message)
    assert answer.status_code == 202, answer.text
    job = await ask(api, agency)
    assert (await api.call("GET", "/whoami", "agency")).status_code in {200, 401}
    await maintenance.run()
    ended = await job_of(api, job)
    assert (ended["state"], ended["done"], ended["total"]) == ("done", 3, 3)
    assert set(await rows_naming(api, agency.id)) == KEPT
    of_organisation = "SELECT FROM usage_hours WHERE %s IN (owner_id, organisation_id)"
    assert await api.sql(of_organisation, first_id(0)) == [], "it was counted before it was deleted"
    left = {"deliveries", "log_entries", "activity_minutes"}
    assert set(await rows_naming(api, agency.its_subscription)) <= left
    report = await verify_chain(api.services.engine, agency.id)
    assert report.broken is None
    assert report.entries > 3
    # What belongs to others is as it was.
    pulled = await api.call("POST", f"/subscriptions/{agency.their_subscription}/pull", json={})
    assert [message["payload"] for message in pulled.json()["messages"]] == [1]
    assert (await api.call("GET", f"/rooms/{agency.their_room}")).status_code == 200
    assert (await api.call("GET", "/whoami", "agency")).status_code == 401
    assert (
        await api.sql(
            "SELECT state::text FROM deliveries WHERE subscription_id = %s", agency.its_subscription
        )
    ) == [("cancelled",)]


async def test_what_its_endpoints_answered_is_shown_to_no_room_owner(
    api: Api, maintenance: Maintenance
) -> None:
    agency = await found_agency(api)
    ((message, delivery),) = await api.sql(
        "UPDATE deliveries SET last_error = 'status: secret answer' WHERE subscription_id = %s"
        " RETURNING message_id::text, id::text",
        agency.its_subscription,
    )
    await api.sql(
        "INSERT INTO log_entries (room_id, message_id, writer_id, writer_seq, kind, subscription_id,"
        " delivery_id, generation, attempt, http_status, error_class, detail, answer_head)"
        " VALUES (%s, %s, 99, 1, 'attempted', %s, %s, 0, 0, 503, 'status', 'secret detail', 'secret answer')",
        agency.their_room, message, agency.its_subscription, delivery,
    )  # fmt: skip

    async def read() -> None:
        for path in ("", "/deliveries", "/journey", "/receipt"):
            answer = await api.call("GET", f"/messages/{message}{path}")
            assert answer.status_code == 200
            assert "secret" not in answer.text, path
        for method, path in (("GET", ""), ("POST", "/redeliver")):
            answer = await api.call(method, f"/deliveries/{delivery}{path}")
            assert answer.status_code == 404, path

    await read()
    await ask(api, agency)
    await maintenance.run()
    assert await api.sql("SELECT 1 FROM subscriptions WHERE id = %s", agency.its_subscription) == []
    assert await api.sql("SELECT 1 FROM deliveries WHERE id = %s", delivery) != []
    await read()


async def test_its_last_entry_says_that_it_was_deleted(api: Api, maintenance: Maintenance) -> None:
    agency = await found_agency(api)
    job = await ask(api, agency)
    await maintenance.run()
    ((kind, action, after),) = await api.sql(
        "SELECT actor_kind, action, after FROM journal WHERE organisation_id = %s ORDER BY seq DESC LIMIT 1",
        agency.id,
    )
    assert (kind, action, after) == ("service", "delete_organisation", {"job_id": job})


async def test_all_rooms_wait_for_one_export_of_the_log(
    api: Api, maintenance: Maintenance, tmp_path: Path
) -> None:
    """More than are deleted at a time; what no export concerns does not wait behind them."""
    exporter = Exporter(api.url, str(tmp_path))
    agency = await found_agency(api)
    await asyncio.to_thread(exporter.run)
    rooms = organisations.MAX_CHILDREN + 4
    for number in range(rooms):
        room = (await api.room(f"its-{number}", "agency"))["id"]
        await api.sql(
            "INSERT INTO log_entries (room_id, message_id, writer_id, writer_seq, kind)"
            " VALUES (%s, gen_random_uuid(), 1001, %s, 'published')",
            room, number + 1,
        )  # fmt: skip
    job = await ask(api, agency)
    for _ in range(6):
        await maintenance.run_round()
    of_it = "SELECT count(*) FROM {} WHERE organisation_id = %s"
    assert await api.sql(of_it.format("rooms"), agency.id) == [(rooms,)]
    for table in ("subscriptions", "queues"):
        assert await api.sql(of_it.format(table), agency.id) == [(0,)], table
    await asyncio.to_thread(exporter.run)
    await api.sql("UPDATE jobs SET snoozed_until = now()")
    await maintenance.run()
    assert await api.sql(of_it.format("rooms"), agency.id) == [(0,)]
    assert (await job_of(api, job))["state"] == "done"


async def test_no_more_rooms_are_begun_than_may_fail_at_a_time(
    api: Api, maintenance: Maintenance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Children that failed are snoozed, like those that wait for an export, but counted."""
    agency = await found_agency(api)
    for number in range(organisations.MAX_CHILDREN + 4):
        await api.room(f"its-{number}", "agency")
    job = await ask(api, agency)

    async def broken(*_: object) -> bool | None:
        raise RuntimeError("the room is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(DeleteQueries, "room_deleting", broken)
        for _ in range(4):
            await maintenance.run_round()
            await api.sql("UPDATE jobs SET snoozed_until = NULL WHERE id = %s", job)
    begun = "SELECT count(*) FROM jobs WHERE kind = 'delete_room' AND error IS NOT NULL"
    assert await api.sql(begun) == [(organisations.MAX_CHILDREN,)]
    async with asyncio.timeout(60):
        while (await job_of(api, job))["state"] == "running":
            await api.sql("UPDATE jobs SET snoozed_until = NULL")
            await maintenance.run_round()
    assert (await job_of(api, job))["state"] == "done"
    assert set(await rows_naming(api, agency.id)) | KEPT == KEPT


class Killed(BaseException):
    """End a process between two of its transactions."""


async def test_a_kill_between_any_two_steps_is_continued(
    api: Api, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    agency = await found_agency(api)
    job = await ask(api, agency)
    may_commit = 0

    @asynccontextmanager
    async def counted(engine: Any) -> AsyncIterator[Any]:
        nonlocal may_commit
        async with transaction(engine) as connection:
            yield connection
        may_commit -= 1
        if may_commit <= 0:
            raise Killed

    monkeypatch.setattr(organisations, "transaction", counted)
    kills = 0
    for lives in itertools.cycle(range(1, 7)):
        process = Maintenance(api, writer)
        open_jobs = await process.open_jobs()
        if not open_jobs:
            break
        may_commit = lives
        try:
            if await process.handler(open_jobs[0], lambda: True):
                await JobQueue(writer).finish_job(open_jobs[0])
        except Killed:
            kills += 1
        await process.run_children()
        assert kills < 200
    assert kills > 10
    assert (await job_of(api, job))["state"] == "done"
    assert set(await rows_naming(api, agency.id)) | KEPT == KEPT
    assert (await verify_chain(api.services.engine, agency.id)).broken is None


async def test_a_stop_before_any_statement_is_continued(
    api: Api, writer: LogWriter, maintenance: Maintenance
) -> None:
    agency = await found_agency(api)
    await ask(api, agency)
    for count in itertools.count():
        open_jobs = await maintenance.open_jobs()
        if not open_jobs:
            break
        (job,) = open_jobs
        left = count

        def may() -> bool:
            nonlocal left
            left -= 1
            return left >= 0

        if await maintenance.handler(job, may):
            await JobQueue(writer).finish_job(job)
        await maintenance.run_children()
        assert count < 100
    assert set(await rows_naming(api, agency.id)) | KEPT == KEPT


async def test_each_thing_has_one_child_however_often_the_job_runs(
    api: Api, maintenance: Maintenance
) -> None:
    agency = await found_agency(api)
    await ask(api, agency)
    (job,) = await maintenance.open_jobs()
    for _ in range(3):
        assert not await maintenance.handler(job, lambda: True)
    children = await api.sql(
        "SELECT kind FROM jobs WHERE arguments ->> 'parent' = %s ORDER BY kind", job.id
    )
    assert children == [("delete_queue",), ("delete_room",), ("delete_subscription",)]


async def test_a_young_job_waits_for_what_is_under_way(api: Api, maintenance: Maintenance) -> None:
    agency = await found_agency(api)
    await ask(api, agency)
    (job,) = await maintenance.open_jobs()
    await maintenance.handler(job, lambda: True)
    await maintenance.run_children()
    young = dataclasses.replace(job, age_s=0.0)
    assert not await maintenance.handler(young, lambda: True)
    assert (await rows_naming(api, agency.id))["organisations"] == 1
    old = dataclasses.replace(job, age_s=60.0)
    assert await maintenance.handler(old, lambda: True)


async def test_what_comes_late_is_deleted_too(
    api: Api, writer: LogWriter, maintenance: Maintenance, monkeypatch: pytest.MonkeyPatch
) -> None:
    agency = await found_agency(api)
    await ask(api, agency)
    (job,) = await maintenance.open_jobs()
    await maintenance.handler(job, lambda: True)
    await maintenance.run_children()
    original = records.delete_organisation

    async def late(connection: Any, organisation: OrganisationId) -> None:
        await api.sql(
            "INSERT INTO rooms (id, organisation_id, name, delivery_delay_ms, delivery_delay_multiplier, delivery_attempts)"
            " VALUES (77, %s, 'late', 1000, 2, 3)",
            organisation,
        )
        monkeypatch.setattr(records, "delete_organisation", original)
        await original(connection, organisation)

    monkeypatch.setattr(records, "delete_organisation", late)
    assert not await maintenance.handler(dataclasses.replace(job, age_s=60.0), lambda: True)
    await maintenance.run()
    assert set(await rows_naming(api, agency.id)) | KEPT == KEPT
    assert await api.sql("SELECT FROM rooms WHERE id = 77") == []


async def test_a_failed_child_fails_the_job_and_a_second_request_continues(
    api: Api, maintenance: Maintenance
) -> None:
    agency = await found_agency(api)
    first = await ask(api, agency)
    whole = maintenance.handlers[JobKind.DELETE_ROOM]

    async def broken(_job: OpenJob, _may: ShouldContinue) -> bool:
        raise ValueError("the room is on fire")

    maintenance.handlers[JobKind.DELETE_ROOM] = broken
    await maintenance.run()
    ended = await job_of(api, first)
    assert ended["state"] == "failed"
    assert "the room is on fire" in ended["error"]
    maintenance.handlers[JobKind.DELETE_ROOM] = whole
    second = await ask(api, agency)
    await maintenance.run()
    assert (await job_of(api, second))["state"] == "done"
    assert set(await rows_naming(api, agency.id)) | KEPT == KEPT


async def test_a_deletion_shows_why_the_deletion_of_a_room_is_tried_again(
    api: Api, maintenance: Maintenance, monkeypatch: pytest.MonkeyPatch
) -> None:
    agency = await found_agency(api)
    first = await ask(api, agency)

    async def broken(*_: object) -> bool | None:
        raise RuntimeError("the room is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(DeleteQueries, "room_deleting", broken)
        for _ in range(2):
            await maintenance.run_round()
    shown = await job_of(api, first)
    assert shown["state"] == "running"
    assert "RuntimeError: the room is on fire" in shown["error"]
    # It may be snoozed again: in the round that deletes the room, it may still see the error.
    async with asyncio.timeout(60):
        while (ended := await job_of(api, first))["state"] == "running":
            await api.sql("UPDATE jobs SET snoozed_until = NULL")
            await maintenance.run_round()
    assert (ended["state"], ended["error"]) == ("done", None)


async def test_a_deletion_that_it_asked_for_goes_on(api: Api, maintenance: Maintenance) -> None:
    agency = await found_agency(api)
    other = await api.made("/organisations", {"name": "second"}, "platform")
    answer = await api.call(
        "DELETE", f"/organisations/{other['id']}", "agency", params={"confirm": "second"}
    )
    assert answer.status_code == 202, answer.text
    await ask(api, agency)
    await maintenance.run()
    assert set(await rows_naming(api, agency.id)) | KEPT == KEPT
    assert await api.sql("SELECT FROM organisations WHERE id = %s", other["id"]) == []


async def test_two_organisations_cannot_delete_each_other(api: Api) -> None:
    agency = await found_agency(api)
    ((default,),) = await api.sql("SELECT id::text FROM organisations WHERE name = 'default'")
    calls = (
        api.call("DELETE", f"/organisations/{agency.id}", "platform", params={"confirm": "agency"}),
        api.call("DELETE", f"/organisations/{default}", "agency", params={"confirm": "default"}),
    )
    answers = await asyncio.gather(*calls)
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses[0] == 202
    assert statuses[1] in {401, 403, 409}
    assert await api.sql("SELECT count(*) FROM organisations WHERE status = 'active'") == [(2,)]


async def test_two_organisations_cannot_suspend_each_other(api: Api) -> None:
    agency = await found_agency(api)
    ((default,),) = await api.sql("SELECT id::text FROM organisations WHERE name = 'default'")
    answers = await asyncio.gather(
        api.call("POST", f"/organisations/{agency.id}/suspend", "platform"),
        api.call("POST", f"/organisations/{default}/suspend", "agency"),
    )
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses[0] == 200
    assert statuses[1] in {403, 409}
    assert await api.sql("SELECT count(*) FROM organisations WHERE status = 'suspended'") == [(1,)]


async def test_the_maintenance_service_deletes_an_organisation(api: Api) -> None:
    agency = await found_agency(api)
    job = await ask(api, agency)
    stop = asyncio.Event()
    clock = api.services.clock
    async with PostgresElection(api.url, member="upkeep", clock=clock) as election:
        running = asyncio.create_task(
            run_tasks(
                database_url=api.url,
                election=election,
                clock=clock,
                stop=stop,
                intervals=TaskIntervals(jobs_s=0.01, settle_s=0.0),
                extra_tasks=QueueTasks(api.services.magazines, Metrics()).task_specs(),
            )
        )
        try:

            async def is_done() -> bool:
                return bool((await job_of(api, job))["state"] == "done")

            await until(is_done, "the job to be done")
        finally:
            stop.set()
            await running
    assert set(await rows_naming(api, agency.id)) | KEPT == KEPT


async def test_the_own_organisation_cannot_be_deleted(api: Api) -> None:
    ((default,),) = await api.sql("SELECT id::text FROM organisations WHERE name = 'default'")
    answer = await api.call(
        "DELETE", f"/organisations/{default}", "platform", params={"confirm": "default"}
    )
    assert answer.status_code == 409


async def test_a_job_for_an_organisation_that_is_not_marked_fails(
    api: Api, maintenance: Maintenance
) -> None:
    agency = await found_agency(api)
    await ask(api, agency)
    await api.sql("UPDATE organisations SET status = 'active' WHERE id = %s", agency.id)
    (job,) = await maintenance.open_jobs()
    with pytest.raises(ValueError, match="not marked"):
        await maintenance.handler(job, lambda: True)
    assert (await api.call("GET", f"/rooms/{agency.its_room}", "agency")).status_code == 200


async def test_a_subscription_to_a_room_that_is_deleted_meanwhile(
    api: Api, maintenance: Maintenance
) -> None:
    agency = await found_agency(api)
    await ask(api, agency)
    answer = await api.call("DELETE", f"/rooms/{agency.their_room}", params={"confirm": "theirs"})
    assert answer.status_code == 202
    await maintenance.run()
    assert set(await rows_naming(api, agency.id)) | KEPT == KEPT
    assert await api.sql("SELECT FROM rooms WHERE id = %s", agency.their_room) == []
