"""Test quotas of publishing: each limit refuses with its name, and nothing is lost or counted twice."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

import pytest
from sqlalchemy import text

from delivery.maintenance.usage import count_usage
from rooms.db import quotas as records
from rooms.db.connection import open_engine, transaction
from rooms.db.quotas import Published, QuotaState
from rooms.domain.ids import KeyId, OrganisationId, RoomId
from rooms.domain.principal import Principal
from rooms.domain.quota import QuotaLimit, Quotas, organisation_subject, room_subject
from rooms.domain.state_machine import Scope
from rooms.errors import (
    QuotaExceededError,
    QuotaTooLargeError,
    StorageRefusedError,
    StorageUnavailableError,
)
from rooms.publishing import quotas as module
from rooms.publishing.publisher import PublishResult
from rooms.publishing.quotas import QuotaKeeper
from tests.support.publisher import Desk, House, open_desk

TYPE: Final = "order.created"


@dataclass
class World:
    """One room and its owner's principal, and a process that publishes."""

    data: House
    desk: Desk
    room: RoomId
    principal: Principal
    limits: Quotas = field(default_factory=Quotas)

    @property
    def keeper(self) -> QuotaKeeper:
        keeper = self.desk.publisher._quotas
        assert keeper is not None
        return keeper

    async def publish(
        self,
        payload: object = None,
        *,
        key: str | None = None,
        quotas: Quotas | None = None,
        desk: Desk | None = None,
        **fields: Any,
    ) -> PublishResult:
        principal = replace(self.principal, quotas=quotas)
        body = json.dumps({"event_type": TYPE, "payload": payload, **fields}).encode()
        return await (desk or self.desk).publisher.publish(principal, self.room, body, key)

    async def publish_batch(
        self, count: int, *, quotas: Quotas | None, ids: str | None = None
    ) -> PublishResult:
        principal = replace(self.principal, quotas=quotas)
        messages = [
            {"event_type": TYPE, "payload": None} | ({} if ids is None else {"id": f"{ids}{n}"})
            for n in range(count)
        ]
        body = json.dumps({"messages": messages}).encode()
        return await self.desk.publisher.publish_batch(principal, self.room, body, None)

    def of_room(self, **limits: int) -> None:
        """Set the quotas of the room, as the API does."""
        self.data.change(
            self.room,
            f"UPDATE rooms SET quotas = '{json.dumps(limits)}' WHERE id = {self.room}",
        )

    def used(self, subject: str) -> tuple[int, int]:
        rows = self.data.run(
            "SELECT messages, bytes FROM quota_days WHERE subject = %s"
            " AND day = (now() AT TIME ZONE 'UTC')::date",
            subject,
        )
        return (rows[0][0], rows[0][1]) if rows else (0, 0)

    @property
    def stored(self) -> int:
        return self.data.count("messages")

    def refusals(self) -> Mapping[str, float]:
        found = self.desk.metrics.quota_refused.collect()
        return {
            sample.labels["limit"]: sample.value
            for family in found
            for sample in family.samples
            if sample.name.endswith("_total")
        }


@pytest.fixture
async def world(database: str) -> AsyncIterator[World]:
    data = House(database)
    room = data.room()
    data.event_type(room)
    async with open_desk(data.url) as desk:
        principal = Principal(
            key_id=KeyId("01900000-0000-7000-8000-0000000000aa"),
            organisation_id=OrganisationId(data.organisation),
            scopes=frozenset({Scope.PUBLISH}),
        )
        yield World(data, desk, room, principal)


@asynccontextmanager
async def second_process(data: House) -> AsyncIterator[Desk]:
    async with open_desk(data.url) as desk:
        yield desk


async def refused(world: World, limit: QuotaLimit, **publish: Any) -> QuotaExceededError:
    before = world.stored
    with pytest.raises(QuotaExceededError) as caught:
        await world.publish(**publish)
    assert caught.value.limit == limit
    assert caught.value.retry_after_s >= 1
    assert limit.value in str(caught.value)
    assert world.stored == before
    return caught.value


async def test_each_limit_of_an_organisation_refuses_by_name(world: World) -> None:
    quotas = Quotas(messages_per_s=2)
    for _ in range(2):
        await world.publish(quotas=quotas)
    await refused(world, QuotaLimit.MESSAGES_PER_S, quotas=quotas)
    day = Quotas(messages_per_day=3)
    for _ in range(3):
        await world.publish(quotas=day)
    error = await refused(world, QuotaLimit.MESSAGES_PER_DAY, quotas=day)
    assert error.retry_after_s <= 86_400
    size = Quotas(bytes_per_day=40)
    await world.publish("x" * 18, quotas=size)
    await refused(world, QuotaLimit.BYTES_PER_DAY, payload="x" * 9, quotas=size)
    with pytest.raises(QuotaTooLargeError) as caught:
        await world.publish("x" * 9, quotas=Quotas(payload_bytes=10))
    assert caught.value.limit == QuotaLimit.PAYLOAD_BYTES
    assert world.refusals() == {
        "messages_per_s": 1, "messages_per_day": 1, "bytes_per_day": 1, "payload_bytes": 1,
    }  # fmt: skip


async def test_each_limit_of_a_room_refuses_by_name(world: World) -> None:
    world.of_room(messages_per_s=1)
    await world.publish()
    await refused(world, QuotaLimit.MESSAGES_PER_S)
    world.of_room(messages_per_day=1)
    world.desk.planner.invalidate([world.room])
    await world.publish()
    await refused(world, QuotaLimit.MESSAGES_PER_DAY)
    world.of_room(payload_bytes=3)
    world.desk.planner.invalidate([world.room])
    with pytest.raises(QuotaTooLargeError):
        await world.publish("long")


async def test_without_quotas_nothing_is_counted(world: World) -> None:
    for _ in range(5):
        await world.publish()
    await world.keeper.sync()
    assert world.data.count("quota_days") == 0


async def test_a_batch_counts_each_message(world: World) -> None:
    quotas = Quotas(messages_per_day=10)
    await world.publish_batch(6, quotas=quotas)
    with pytest.raises(QuotaExceededError):
        await world.publish_batch(5, quotas=quotas)
    await world.publish_batch(4, quotas=quotas)
    await world.keeper.sync()
    subject = organisation_subject(world.principal.organisation_id)
    assert world.used(subject) == (10, 40)
    assert world.stored == 10


async def test_a_large_batch_is_taken_once_and_delays_the_next(world: World) -> None:
    """A batch larger than a second's share would otherwise be refused for ever."""
    quotas = Quotas(messages_per_s=2)
    await world.publish_batch(50, quotas=quotas)
    error = await refused(world, QuotaLimit.MESSAGES_PER_S, quotas=quotas)
    assert 20 <= error.retry_after_s <= 26


async def test_retries_of_accepted_requests_are_answered(world: World) -> None:
    """A retry is neither refused nor counted, whichever limit is used up."""
    quotas = Quotas(messages_per_day=2, payload_bytes=20)
    first = await world.publish("a", key="k", quotas=quotas)
    again = await world.publish("a", key="k", quotas=quotas)
    assert (again.body, again.replayed) == (first.body, True)
    named = await world.publish("b", id="mine", quotas=quotas)
    for _ in range(3):
        assert (await world.publish("a", key="k", quotas=quotas)).body == first.body
        assert (await world.publish("b", id="mine", quotas=quotas)).body == named.body
    await refused(world, QuotaLimit.MESSAGES_PER_DAY, payload="c", key="new", quotas=quotas)
    narrow = replace(quotas, payload_bytes=1)
    assert (await world.publish("a", key="k", quotas=narrow)).body == first.body
    await world.keeper.sync()
    assert world.used(organisation_subject(world.principal.organisation_id))[0] == 2


async def test_a_batch_that_is_partly_known_counts_what_is_new(world: World) -> None:
    quotas = Quotas(messages_per_day=100)
    await world.publish_batch(3, quotas=quotas, ids="m")
    await world.publish_batch(5, quotas=quotas, ids="m")
    await world.keeper.sync()
    assert world.used(organisation_subject(world.principal.organisation_id)) == (5, 20)
    assert world.stored == 5


async def test_what_fails_is_given_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    quotas = Quotas(messages_per_day=1, messages_per_s=1)

    async def fail(*_: object, **__: object) -> PublishResult:
        raise StorageRefusedError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(world.desk.publisher, "_commit", fail)
        for _ in range(3):
            with pytest.raises(StorageRefusedError):
                await world.publish(quotas=quotas)
    await world.publish(quotas=quotas)
    await world.keeper.sync()
    assert world.used(organisation_subject(world.principal.organisation_id))[0] == 1


async def test_a_retry_after_the_time_given_succeeds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Move the keeper's clock by what the refusal says."""
    offset = [0.0]
    clock = world.keeper._monotonic
    monkeypatch.setattr(world.keeper, "_monotonic", lambda: clock() + offset[0])
    quotas = Quotas(messages_per_s=1)
    await world.publish(quotas=quotas)
    error = await refused(world, QuotaLimit.MESSAGES_PER_S, quotas=quotas)
    offset[0] = error.retry_after_s
    await world.publish(quotas=quotas)
    day = Quotas(messages_per_day=1)
    await world.publish(quotas=day)
    error = await refused(world, QuotaLimit.MESSAGES_PER_DAY, quotas=day)
    await world.keeper.sync()
    offset[0] += error.retry_after_s
    world.data.run("UPDATE quota_days SET day = day - 1")
    await world.keeper.sync()
    world.keeper._used.clear()  # PostgreSQL's day has not changed
    await world.publish(quotas=day)


async def test_a_restart_keeps_what_was_used(world: World) -> None:
    quotas = Quotas(messages_per_day=5)
    for _ in range(3):
        await world.publish(quotas=quotas)
    await world.keeper.sync()
    async with second_process(world.data) as desk:
        for _ in range(2):
            await world.publish(quotas=quotas, desk=desk)
        await refused(world, QuotaLimit.MESSAGES_PER_DAY, quotas=quotas, desk=desk)
    await world.keeper.sync()
    await refused(world, QuotaLimit.MESSAGES_PER_DAY, quotas=quotas)


async def test_a_process_that_ends_writes_what_it_counted(world: World) -> None:
    quotas = Quotas(messages_per_day=5)
    async with second_process(world.data) as desk:
        for _ in range(4):
            await world.publish(quotas=quotas, desk=desk)
    assert world.used(organisation_subject(world.principal.organisation_id))[0] == 4


async def test_two_processes_exceed_a_day_by_one_interval_at_most(world: World) -> None:
    """Each may accept, in one interval, what the others do not know yet; then both refuse."""
    most = 40
    quotas = Quotas(messages_per_day=most)

    async def until_refused(desk: Desk, burst: int) -> int:
        accepted = 0
        for _ in range(burst):
            try:
                await world.publish(quotas=quotas, desk=desk)
            except QuotaExceededError:
                break
            accepted += 1
        return accepted

    async with second_process(world.data) as desk:
        other = desk.publisher._quotas
        assert other is not None
        burst, total = 6, 0
        for _ in range(20):
            total += sum(
                await asyncio.gather(until_refused(world.desk, burst), until_refused(desk, burst))
            )
            await asyncio.gather(world.keeper.sync(), other.sync())
            await asyncio.gather(world.keeper.sync(), other.sync())
        assert most <= total <= most + burst
        assert world.stored == total


async def test_a_rate_is_shared_by_the_processes_that_run(world: World) -> None:
    """Two processes have half of it each."""
    for name in ("a", "b"):
        world.data.run(
            "INSERT INTO processes (name, kind, host, pid, broker, election, magazines, farm, client)"
            " VALUES (%s, 'serve', 'h', 1, '', '', '', '', '')",
            name,
        )
    await world.keeper.sync()
    quotas = Quotas(messages_per_s=4)
    for _ in range(2):
        await world.publish(quotas=quotas)
    await refused(world, QuotaLimit.MESSAGES_PER_S, quotas=quotas)


async def test_refusals_of_a_tenant_cost_no_statement(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse a thousand requests, some with keys: PostgreSQL is asked ten times at most."""
    quotas = Quotas(messages_per_day=0)
    await world.publish()
    looked_up = 0
    find = world.desk.publisher._find_by_idempotency_key

    async def counting(room: RoomId, key: str) -> tuple[bytes, bytes] | None:
        nonlocal looked_up
        looked_up += 1
        return await find(room, key)

    monkeypatch.setattr(world.desk.publisher, "_find_by_idempotency_key", counting)
    monkeypatch.setattr(world.keeper._lookups, "_monotonic", lambda: 1.0)
    world.keeper._lookups._buckets.clear()
    committers = world.desk.publisher._committers
    monkeypatch.setattr(world.desk.publisher, "_committers", None)
    for number in range(1000):
        with pytest.raises(QuotaExceededError):
            await world.publish(quotas=quotas, key=f"k{number}" if number % 2 else None)
    monkeypatch.setattr(world.desk.publisher, "_committers", committers)
    assert looked_up == module.LOOKUPS_PER_S
    assert world.stored == 1
    await world.publish()


async def test_a_full_room_refuses_until_there_is_space(world: World) -> None:
    world.of_room(stored_messages=2)
    for _ in range(2):
        await world.publish()
    engine = open_engine(world.data.url, size=1)
    try:
        for store in await records.limited_stores(engine):
            await records.estimate_stored(engine, store)
        await world.keeper.sync()
        await refused(world, QuotaLimit.STORED_MESSAGES)
        world.data.run("DELETE FROM messages WHERE ctid = (SELECT ctid FROM messages LIMIT 1)")
        for store in await records.limited_stores(engine):
            await records.estimate_stored(engine, store)
        await world.keeper.sync()
        await world.publish()
        await records.delete_old_use(engine, [])
        assert world.data.count("quota_stored") == 0
    finally:
        await engine.dispose()


async def test_a_full_organisation_closes_all_its_rooms(world: World) -> None:
    other = world.data.room()
    world.data.event_type(other)
    await world.publish()
    world.data.run(
        "UPDATE organisations SET quotas = '{\"stored_messages\": 1}' WHERE id = %s",
        world.principal.organisation_id,
    )
    engine = open_engine(world.data.url, size=1)
    try:
        for store in await records.limited_stores(engine):
            await records.estimate_stored(engine, store)
    finally:
        await engine.dispose()
    await world.keeper.sync()
    world.room = other
    await refused(world, QuotaLimit.STORED_MESSAGES)


@pytest.mark.parametrize("full", ["room", "organisation"])
async def test_what_is_full_takes_the_fast_way_from_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    """Its own publishes are refused by the ordinary way; all others still need no wait."""
    other = House(world.data.url)
    elsewhere = other.room()
    other.event_type(elsewhere)
    body = json.dumps({"event_type": TYPE, "payload": None}).encode()

    async def is_fast(principal: Principal, room: RoomId) -> bool:
        await world.desk.planner.get(room, principal.organisation_id)
        settled: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        answer = world.desk.publisher.publish_nowait(principal, room, body, settled.set_result)
        return answer is not None and await settled is None

    assert await is_fast(world.principal, world.room)
    world.data.run(
        "INSERT INTO quota_stored (subject, messages, is_full, at) VALUES (%s, 1, true, now())",
        room_subject(world.room)
        if full == "room"
        else organisation_subject(world.principal.organisation_id),
    )
    await world.keeper.sync()
    assert not await is_fast(world.principal, world.room)
    assert await is_fast(other.principal, elsewhere)
    await refused(world, QuotaLimit.STORED_MESSAGES)
    monkeypatch.setattr(world.keeper, "admit", None)  # It is not asked for others.
    await world.desk.publisher.publish(other.principal, elsewhere, body, "key")


async def test_counts_survive_an_outage(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts that could not be added are added later, and limits hold meanwhile."""
    quotas = Quotas(messages_per_day=2)
    sync = world.keeper._sync_used

    async def fail(*_: object) -> QuotaState:
        raise StorageUnavailableError("gone")

    monkeypatch.setattr(world.keeper, "_sync_used", fail)
    for _ in range(2):
        await world.publish(quotas=quotas)
    with pytest.raises(StorageUnavailableError):
        await world.keeper.sync()
    await refused(world, QuotaLimit.MESSAGES_PER_DAY, quotas=quotas)
    monkeypatch.setattr(world.keeper, "_sync_used", sync)
    await world.keeper.sync()
    assert world.used(organisation_subject(world.principal.organisation_id))[0] == 2
    await refused(world, QuotaLimit.MESSAGES_PER_DAY, quotas=quotas)


async def test_a_limit_that_is_set_later_counts_the_day_so_far(world: World) -> None:
    world.data.run(
        "INSERT INTO usage_hours (room_id, hour, owner_id, organisation_id, event_type, messages, bytes)"
        " VALUES (%s, date_trunc('day', now(), 'UTC'), %s, %s, 'x', 7, 70)",
        world.room, world.principal.organisation_id, world.principal.organisation_id,
    )  # fmt: skip
    engine = open_engine(world.data.url, size=1)
    try:
        async with transaction(engine) as connection:
            quotas = Quotas(messages_per_day=7)
            await records.set_quotas(
                connection, quotas, organisation=world.principal.organisation_id
            )
            await records.set_quotas(connection, Quotas(bytes_per_day=9), room=world.room)
            use = await records.find_use(connection, organisation=world.principal.organisation_id)
            assert await records.find_quotas(connection, room=world.room) == Quotas(bytes_per_day=9)
    finally:
        await engine.dispose()
    assert (use.messages_per_day, use.bytes_per_day) == (7, 70)
    assert world.used(room_subject(world.room)) == (7, 70)
    await world.keeper.sync()
    await refused(world, QuotaLimit.MESSAGES_PER_DAY, quotas=Quotas(messages_per_day=7))


@pytest.mark.parametrize("counted", [None, 0, 3, 5])
async def test_a_limit_that_is_set_later_counts_what_usage_has_not_counted_yet(
    world: World, counted: int | None
) -> None:
    """Each message of the day counts once, however many usage has counted; None: it never has."""
    organisation, other = world.principal.organisation_id, OrganisationId(str(uuid4()))
    first = world.room
    engine = open_engine(world.data.url, size=2)

    async def limit(**whose: Any) -> None:
        async with transaction(engine) as connection:
            await records.set_quotas(connection, Quotas(messages_per_day=9), **whose)

    try:
        for number in range(6):
            if number == counted:
                await count_usage(engine, lambda: True)
            if number == 5:  # into another room
                world.room = world.data.room()
                world.data.event_type(world.room)
            await world.publish("ab")
            if number == 0:
                world.data.run("UPDATE messages SET publisher_organisation_id = %s", other)
        await limit(organisation=organisation)
        await limit(organisation=other)
        await limit(room=first)
        assert world.used(organisation_subject(organisation)) == (5, 20)
        assert world.used(organisation_subject(other)) == (1, 4)
        assert world.used(room_subject(first)) == (5, 20)

        # A limit that is changed counts nothing again: the process adds what the log has already.
        await world.publish(quotas=Quotas(messages_per_day=9))
        await limit(organisation=organisation)
        await world.keeper.sync()
        assert world.used(organisation_subject(organisation))[0] == 6
    finally:
        await engine.dispose()


async def test_other_rows_of_the_log_do_not_use_up_the_first_count(world: World) -> None:
    """While a transaction is open, usage counts nothing, and so many rows wait."""
    await world.publish("ab")
    world.data.run(
        "INSERT INTO log_entries (room_id, message_id, writer_id, writer_seq, kind)"
        " SELECT room_id, message_id, 9, n, 'enqueued' FROM generate_series(1, 50001) n,"
        " (SELECT room_id, message_id FROM log_entries LIMIT 1) l"
    )
    await world.publish("ab")
    await world.publish("ab")
    engine = open_engine(world.data.url, size=1)
    try:
        async with transaction(engine) as connection:
            quotas = Quotas(messages_per_day=9)
            await records.set_quotas(
                connection, quotas, organisation=world.principal.organisation_id
            )
            await records.set_quotas(connection, quotas, room=world.room)
    finally:
        await engine.dispose()
    assert world.used(organisation_subject(world.principal.organisation_id)) == (3, 12)
    assert world.used(room_subject(world.room)) == (3, 12)


async def test_a_limit_is_set_also_where_its_first_count_takes_too_long(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(world.data.url, size=2)
    try:
        await world.publish("ab")
        await count_usage(engine, lambda: True)
        await world.publish("ab")
        settings = text(
            "SELECT current_setting('statement_timeout'), current_setting('enable_seqscan'),"
            " current_setting('enable_indexscan')"
        )
        async with transaction(engine) as locking, asyncio.timeout(30):
            await locking.execute(text("LOCK TABLE log_entries IN ACCESS EXCLUSIVE MODE"))
            async with transaction(engine) as connection:
                await connection.execute(text("SET LOCAL statement_timeout = '29s'"))
                before = (await connection.execute(settings)).one()
                await records.set_quotas(connection, Quotas(messages_per_day=9), room=world.room)
                assert (await connection.execute(settings)).one() == before
        async with transaction(engine) as connection:
            await connection.execute(text("SET LOCAL statement_timeout = '29s'"))
            limited = await records.find_quotas(connection, room=world.room)
            await records.set_quotas(connection, Quotas(), room=world.room)
            await records.set_quotas(connection, limited, room=world.room)
            assert (await connection.execute(settings)).one() == before
    finally:
        await engine.dispose()
    assert limited == Quotas(messages_per_day=9)
    assert world.used(room_subject(world.room)) == (2, 8)
    assert caplog.messages == [
        f"the first count of {room_subject(world.room)} lacks the latest messages"
    ]


async def test_the_next_day_begins_at_zero() -> None:
    """A keeper forgets the day at midnight of PostgreSQL, before it is synchronised again."""
    now = [0.0]
    states = iter([("2026-01-01", 100.0), ("2026-01-02", 86_000.0)])

    async def sync(_: Mapping[str, Published], __: object) -> QuotaState:
        day, left_s = next(states)
        used = {"organisation:o": Published(messages=5, bytes=5)} if day == "2026-01-01" else {}
        return QuotaState(
            at=datetime(2026, 1, 1, tzinfo=UTC), day=day, day_left_s=left_s, processes=1, used=used,
            full_subjects=frozenset(),
        )  # fmt: skip

    keeper = QuotaKeeper(sync, lambda: now[0])
    await keeper.sync()

    def admit() -> None:
        organisation = OrganisationId("o")
        quotas = Quotas(messages_per_day=5)
        keeper.admit((organisation, quotas), (RoomId(1), None), organisation, [1])

    with pytest.raises(QuotaExceededError) as caught:
        admit()
    assert caught.value.retry_after_s == 100
    now[0] = 100.0
    admit()
    await keeper.sync()
    for _ in range(5):
        admit()
