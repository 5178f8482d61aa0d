"""Test the task that applies grants whose time has begun or ended to subscriptions."""

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select

from delivery.maintenance import grants as task
from delivery.maintenance.grants import apply_due_grants
from delivery.maintenance.service import TaskIntervals, all_tasks
from rooms.db.catalog.grants import revoke_grant
from rooms.db.catalog.rooms import touch_shared_room
from rooms.db.connection import transaction
from rooms.db.jobs.granted_subscriptions import reconcile_grants
from rooms.db.notify import Channel, Notifier
from rooms.domain.ids import RoomId
from rooms.domain.sharing import GrantKind
from rooms.errors import StorageRefusedError
from tests.integration.rooms.api.conftest import Api
from tests.support.installation import until


def in_an_hour(hours: float = 1.0) -> str:
    return (datetime.now(UTC) + timedelta(hours=hours)).isoformat()


@dataclasses.dataclass
class Shared:
    """A room with a subscription of another organisation, which a grant admits."""

    api: Api
    room: int
    subscription: str

    async def grant(self, **fields: Any) -> str:
        body = {"organisation_id": "other", "kind": "subscribe", **fields}
        return str((await self.api.made(f"/rooms/{self.room}/grants", body))["id"])

    async def move(self, grant: str, column: str) -> None:
        """Let a time of the grant have come a moment ago."""
        await self.api.sql(
            f"UPDATE grants SET {column} = now() - interval '1 ms' WHERE id = %s",
            grant,
        )

    async def run(self) -> None:
        services = self.api.services
        await apply_due_grants(
            services.engine, services.notifier, services.new_job_id, lambda: True
        )

    async def status(self) -> tuple[str, list[str]]:
        ((status, reasons),) = await self.api.sql(
            "SELECT status, suspended_by FROM subscriptions WHERE id = %s", self.subscription
        )
        return status, reasons

    async def plan_version(self) -> int:
        ((version,),) = await self.api.sql(
            "SELECT plan_version FROM rooms WHERE id = %s", self.room
        )
        return int(version)


ACTIVE: tuple[str, list[str]] = ("active", [])
SUSPENDED: tuple[str, list[str]] = ("suspended", ["grant"])


@pytest.fixture
async def shared(api: Api) -> Shared:
    room = (await api.room())["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    shared = Shared(api, room, "")
    grant = await shared.grant()
    made = await api.made(
        f"/rooms/{room}/subscriptions", {"name": "theirs", "type": "PULL"}, "stranger"
    )
    shared.subscription = made["id"]
    assert await shared.status() == ACTIVE
    await shared.grant(until=in_an_hour())
    answer = await api.call("DELETE", f"/rooms/{room}/grants/{grant}")
    assert answer.status_code == 204
    assert await shared.status() == ACTIVE
    return shared


async def newest_grant(shared: Shared) -> str:
    found = (await shared.api.call("GET", f"/rooms/{shared.room}/grants")).json()["items"]
    return str(found[0]["id"])


async def test_a_subscription_is_suspended_when_its_grant_ends(shared: Shared) -> None:
    await shared.run()
    assert await shared.status() == ACTIVE
    await shared.move(await newest_grant(shared), "until")
    version = await shared.plan_version()
    await shared.run()
    assert await shared.status() == SUSPENDED
    assert await shared.plan_version() == version + 1
    history = await shared.api.sql(
        "SELECT action, organisation_id, reason FROM subscription_history WHERE subscription_id = %s ORDER BY at DESC LIMIT 1",
        shared.subscription,
    )
    assert history == [("suspended", None, "grant")]


async def test_an_end_is_applied_once(shared: Shared) -> None:
    await shared.move(await newest_grant(shared), "until")
    await shared.run()
    version = await shared.plan_version()
    await shared.run()
    assert await shared.plan_version() == version


async def test_a_suspension_is_lifted_when_a_grant_begins(shared: Shared) -> None:
    later = await shared.grant(starts_at=in_an_hour(), until=in_an_hour(2))
    first = (await shared.api.call("GET", f"/rooms/{shared.room}/grants")).json()["items"][1]["id"]
    await shared.move(first, "until")
    await shared.run()
    assert await shared.status() == SUSPENDED
    await shared.api.publish(shared.room, "made", 1)
    pulled = await shared.api.call(
        "POST", f"/subscriptions/{shared.subscription}/pull", "stranger", json={}
    )
    assert pulled.json() == {"messages": []}
    await shared.move(later, "starts_at")
    await shared.run()
    assert await shared.status() == ACTIVE
    pulled = await shared.api.call(
        "POST", f"/subscriptions/{shared.subscription}/pull", "stranger", json={}
    )
    assert [message["payload"] for message in pulled.json()["messages"]] == [1]


async def test_a_begin_that_is_days_late_is_applied(shared: Shared) -> None:
    await shared.move(await newest_grant(shared), "until")
    await shared.run()
    later = await shared.grant(starts_at=in_an_hour())
    await shared.api.sql(
        "UPDATE grants SET starts_at = now() - interval '3 days', created_at = now() - interval '4 days' WHERE id = %s",
        later,
    )
    await shared.run()
    assert await shared.status() == ACTIVE
    version = await shared.plan_version()
    await shared.run()
    assert await shared.plan_version() == version


async def test_a_grant_for_the_future_admits_no_subscriber_yet(shared: Shared) -> None:
    await shared.move(await newest_grant(shared), "until")
    await shared.run()
    await shared.grant(starts_at=in_an_hour())
    await shared.run()
    assert await shared.status() == SUSPENDED


async def test_a_grant_to_publish_begins_and_ends(shared: Shared) -> None:
    api, room = shared.api, shared.room
    body = {"event_type": "made", "payload": 1}
    grant = await shared.grant(kind="publish", starts_at=in_an_hour(), until=in_an_hour(2))

    async def publish() -> int:
        return (
            await api.call("POST", f"/rooms/{room}/messages", "other-publish", json=body)
        ).status_code

    assert await publish() == 403
    await shared.move(grant, "starts_at")
    await shared.run()
    assert await publish() == 202
    await shared.move(grant, "until")
    await shared.run()
    assert await publish() == 403
    ((revoked,),) = await api.sql("SELECT revoked_at = until FROM grants WHERE id = %s", grant)
    assert revoked


async def test_a_grant_counts_for_a_transaction_that_began_before_it(shared: Shared) -> None:
    """Let a revocation begin, then wait for the room until another grant was created."""
    former, room, services = await newest_grant(shared), RoomId(shared.room), shared.api.services
    async with transaction(services.engine) as connection:
        await connection.execute(select(func.now()))
        await shared.grant()
        await touch_shared_room(connection, room)
        await revoke_grant(connection, room, former)
        kind = GrantKind.SUBSCRIBE
        assert not await reconcile_grants(connection, room, services.new_job_id, changed_kind=kind)
    assert await shared.status() == ACTIVE


async def test_the_rooms_of_a_locked_one_are_not_held_up(shared: Shared) -> None:
    """Every room is tried in a run, and one that is being deleted is left alone."""
    await shared.move(await newest_grant(shared), "until")
    other = (await shared.api.room("gone"))["id"]
    body = {"organisation_id": "other", "kind": "subscribe", "until": in_an_hour()}
    grant = (await shared.api.made(f"/rooms/{other}/grants", body))["id"]
    await shared.move(grant, "until")
    await shared.api.sql("UPDATE rooms SET deleting = true WHERE id = %s", other)
    await shared.run()
    assert await shared.status() == SUSPENDED
    assert await shared.api.sql("SELECT revoked_at FROM grants WHERE id = %s", grant) == [(None,)]


async def rooms_with_an_ended_grant(shared: Shared, owner: str, *numbers: int) -> None:
    """Add rooms of an organisation, each with a grant that has just ended."""
    api = shared.api
    await api.sql(
        "INSERT INTO organisations (id, name) VALUES (%s, %s) ON CONFLICT DO NOTHING", owner, owner
    )
    await api.sql(
        "INSERT INTO rooms (id, organisation_id, name, delivery_delay_ms, delivery_delay_multiplier, delivery_attempts)"
        " SELECT n, %s, 'room-' || n, 50, 2.0, 3 FROM unnest(%s::int4[]) n",
        owner,
        list(numbers),
    )
    await api.sql(
        "INSERT INTO grants (room_id, id, kind, starts_at, until)"
        " SELECT n, gen_random_uuid(), 'subscribe', now() - interval '2 h', now() - interval '1 s' FROM unnest(%s::int4[]) n",
        list(numbers),
    )


def owner_id(number: int) -> str:
    return f"00000000-0000-7000-8000-{number:012x}"


async def applied(shared: Shared, monkeypatch: pytest.MonkeyPatch, *, stop_after: int) -> list[int]:
    """Run until so many rooms are done; return them in their order."""
    order: list[int] = []
    apply = task._apply

    async def recorded(*given: Any) -> bool:
        order.append(given[-1])
        return await apply(*given)

    with monkeypatch.context() as patch:
        patch.setattr(task, "_apply", recorded)
        services = shared.api.services
        await apply_due_grants(
            services.engine,
            services.notifier,
            services.new_job_id,
            lambda: len(order) < stop_after,
        )
    return order


@pytest.mark.parametrize("batch", [2, 100])
async def test_an_owner_waits_for_one_room_of_each_other_owner(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """Also if more owners have some than are read at a time."""
    monkeypatch.setattr(task, "BATCH", batch)
    for owner in (1, 2, 3):
        await rooms_with_an_ended_grant(
            shared, owner_id(owner), *(100 * owner + n for n in range(3))
        )
    await rooms_with_an_ended_grant(shared, owner_id(4), 900)
    order = await applied(shared, monkeypatch, stop_after=100)
    assert order[:4] == [100, 200, 300, 900]
    assert sorted(order) == [*range(100, 103), *range(200, 203), *range(300, 303), 900]
    ((left,),) = await shared.api.sql(
        "SELECT count(*) FROM grants WHERE until < now() AND revoked_at IS NULL"
    )
    assert left == 0


async def test_what_comes_due_during_a_run_waits_for_one_batch(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "BATCH", 2)
    await rooms_with_an_ended_grant(shared, owner_id(1), *range(100, 120))
    assert await applied(shared, monkeypatch, stop_after=3) == [100, 101, 102]
    await rooms_with_an_ended_grant(shared, owner_id(2), 900)
    assert (await applied(shared, monkeypatch, stop_after=100))[:2] == [103, 900]


async def test_a_room_that_is_refused_is_tried_once_in_a_run(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "BATCH", 1)
    await rooms_with_an_ended_grant(shared, owner_id(1), 100, 101)
    tried: list[int] = []

    async def refuse(*given: Any) -> bool:
        tried.append(given[-1])
        raise StorageRefusedError("its room is locked")

    with monkeypatch.context() as patch:
        patch.setattr(task, "_apply", refuse)
        await shared.run()
    assert tried == [100, 101]
    assert await applied(shared, monkeypatch, stop_after=100) == [100, 101]


async def test_every_process_hears_of_it(shared: Shared) -> None:
    heard: set[tuple[Channel, str]] = set()
    await shared.move(await newest_grant(shared), "until")

    def listener(channel: Channel) -> Callable[[frozenset[str]], None]:
        return lambda names: heard.update((channel, name) for name in names)

    channels = (Channel.CONFIG, Channel.PULL)
    async with Notifier(shared.api.url, listeners={one: listener(one) for one in channels}):
        await shared.run()

        async def look() -> bool:
            return {
                (Channel.CONFIG, str(shared.room)),
                (Channel.PULL, shared.subscription),
            } <= heard

        await until(look, "the notifications")


def test_the_leader_assigns_the_task() -> None:
    spec = {task.partition: task for task in all_tasks(TaskIntervals())}["upkeep/grants"]
    assert spec.every_s == TaskIntervals().grants_s == 1.0
