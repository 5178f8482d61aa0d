"""Test scheduled shovels: the settings, what is due, and that each is requested once."""

import asyncio
from typing import Any

import pytest

from delivery.sideline import tasks
from delivery.sideline.tasks import ShovelScheduler
from rooms.db.catalog import shovel_schedules
from rooms.domain.ids import IdGenerator
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.test_sideline import sidelined

DUE = "UPDATE shovel_schedules SET next_at = now() - interval '1 second'"


def schedule(subscription: dict[str, Any]) -> str:
    return f"/subscriptions/{subscription['id']}/sideline/schedule"


async def look(api: Api) -> list[dict[str, Any]]:
    """Run the task once, and return every requested shovel, the newest first."""
    await ShovelScheduler(api.services.engine, api.services.clock, api.services.ids).run(
        lambda: True
    )
    jobs: list[dict[str, Any]] = (await api.call("GET", "/jobs")).json()["items"]
    return [job for job in jobs if job["kind"] == "shovel_sideline"]


async def test_a_schedule_is_set_shown_replaced_and_deleted(api: Api) -> None:
    subscription = await sidelined(api, 1)
    path = schedule(subscription)
    assert (await api.call("GET", path)).status_code == 404
    made = (await api.call("PUT", path, "operate", json={"interval_s": 60})).json()
    assert (made["interval_s"], made["rate_per_s"], made["concurrency"], made["max_shovels"]) == (
        60,
        None,
        4,
        3,
    )
    other = {"interval_s": 600, "rate_per_s": 2.5, "concurrency": 1, "max_shovels": 9}
    replaced = (await api.call("PUT", path, json=other)).json()
    assert replaced == other | {"next_at": replaced["next_at"]}
    assert replaced["next_at"] > made["next_at"]
    assert (await api.call("GET", path)).json() == replaced
    for _ in range(2):
        assert (await api.call("DELETE", path)).status_code == 204
    assert (await api.call("GET", path)).status_code == 404
    for body in (
        {},
        {"interval_s": 0},
        {"interval_s": 60, "concurrency": 17},
        {"interval_s": 60, "rate_per_s": 0},
    ):
        assert (await api.call("PUT", path, json=body)).status_code == 422, body


async def test_a_due_shovel_is_requested_once_an_interval(api: Api) -> None:
    subscription = await sidelined(api)
    body = {"interval_s": 600, "rate_per_s": 7, "max_shovels": 2}
    await api.call("PUT", schedule(subscription), json=body)
    assert await look(api) == []
    await api.sql(DUE)
    # Two members that scan at the same moment: one of them finds it.
    await asyncio.gather(*(look(api) for _ in range(4)))
    (job,) = await look(api)
    wanted = {"rate_per_s": 7, "max_shovels": 2, "subscription_id": subscription["id"]}
    assert job["arguments"].items() >= wanted.items()
    assert job["state"] == "queued"
    # While that one has not ended there is no other, however long the interval has passed.
    await api.sql(DUE)
    assert len(await look(api)) == 1
    await api.sql("UPDATE jobs SET state = 'done'")
    assert len(await look(api)) == 1
    await api.sql(DUE)
    assert len(await look(api)) == 2


async def test_empty_and_deleted_sidelines_are_not_shoveled(api: Api) -> None:
    subscription = await sidelined(api, 1)
    await api.call("PUT", schedule(subscription), json={"interval_s": 60})
    await api.sql("DELETE FROM sidelined")
    await api.sql(DUE)
    assert await look(api) == []
    assert await api.sql("SELECT next_at > now() FROM shovel_schedules") == [(True,)]
    assert (await api.call("DELETE", f"/subscriptions/{subscription['id']}")).status_code == 202
    assert await look(api) == []
    assert await api.sql("SELECT 1 FROM shovel_schedules") == []


async def several(api: Api, number: int) -> list[dict[str, Any]]:
    """Return so many subscriptions of one room, each with something sidelined."""
    found = [await sidelined(api, 1)]
    room = found[0]["room_id"]
    found += [await api.subscription(room, f"more-{one}") for one in range(1, number)]
    for subscription in found[1:]:
        await api.sql(
            "INSERT INTO sidelined (room_id, id, subscription_id, generation, reason, since)"
            f" VALUES ({room}, gen_random_uuid(), '{subscription['id']}', 0, 'orphan', now())"
        )
    return found


async def test_organisations_take_turns_where_many_shovels_are_due(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shovel_schedules, "_MAX_DUE", 2)
    many = await several(api, 3)
    for subscription in many:
        await api.call("PUT", schedule(subscription), json={"interval_s": 600})
    await api.sql(DUE)
    await api.sql(
        "WITH o AS (INSERT INTO organisations (id, name) VALUES (gen_random_uuid(), 'third')"
        " RETURNING id) UPDATE subscriptions SET organisation_id = (SELECT id FROM o)"
        f" WHERE id = '{many[2]['id']}'"
    )
    await ShovelScheduler(api.services.engine, api.services.clock, api.services.ids).run(
        lambda: True
    )
    found = await api.sql("SELECT arguments->>'subscription_id' FROM jobs ORDER BY 1")
    assert len(found) == 2
    assert (many[2]["id"],) in found


async def test_due_schedules_are_looked_at_in_parts(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are due, a call reads a bounded number, and the next one those behind them."""
    monkeypatch.setattr(shovel_schedules, "_MAX_DUE", 2)
    monkeypatch.setattr(shovel_schedules, "_MAX_READ", 3, raising=False)
    many = await several(api, 6)
    for number, subscription in enumerate(many):
        await api.call("PUT", schedule(subscription), json={"interval_s": 600})
        await api.sql(
            "UPDATE shovel_schedules SET next_at = now() - %s * interval '1 min' WHERE subscription_id = %s RETURNING 1",
            10 - number,
            subscription["id"],
        )
    await api.sql(
        "WITH o AS (INSERT INTO organisations (id, name) VALUES (gen_random_uuid(), 'late')"
        " RETURNING id) UPDATE subscriptions SET organisation_id = (SELECT id FROM o) WHERE id = %s",
        many[-1]["id"],
    )
    scheduler = ShovelScheduler(api.services.engine, api.services.clock, api.services.ids)
    chosen: list[list[int]] = []
    for _ in range(4):
        await scheduler.run(lambda: True)
        found = await api.sql("SELECT arguments->>'subscription_id' FROM jobs")
        chosen.append(sorted(n for n, one in enumerate(many) if (one["id"],) in found))
    assert chosen == [[0, 1], [0, 1, 3, 5], [0, 1, 3, 5], [0, 1, 2, 3, 4, 5]]


async def test_more_organisations_than_are_chosen_at_a_time_all_have_their_turns(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short their intervals are: those that were due first are chosen first."""
    monkeypatch.setattr(shovel_schedules, "_MAX_DUE", 2)
    many = await several(api, 5)
    for number, subscription in enumerate(many):
        await api.call("PUT", schedule(subscription), json={"interval_s": 1})
        await api.sql(
            "WITH o AS (INSERT INTO organisations (id, name) VALUES (gen_random_uuid(), %s)"
            " RETURNING id) UPDATE subscriptions SET organisation_id = (SELECT id FROM o)"
            " WHERE id = %s",
            f"organisation {number}",
            subscription["id"],
        )
    await api.sql("UPDATE shovel_schedules SET next_at = now() - interval '1 hour'")
    for _ in range(3):
        await ShovelScheduler(api.services.engine, api.services.clock, api.services.ids).run(
            lambda: True
        )
        # Those that were chosen are due again, as they are where intervals are short.
        await api.sql("UPDATE shovel_schedules SET next_at = next_at - interval '2 s'")
    found = await api.sql("SELECT DISTINCT arguments->>'subscription_id' FROM jobs")
    assert {one for (one,) in found} == {one["id"] for one in many}


async def test_an_organisation_with_too_many_open_jobs_waits_for_the_next_interval(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "MAX_OPEN_JOBS", 1)
    for subscription in await several(api, 3):
        await api.call("PUT", schedule(subscription), json={"interval_s": 600})
    await api.sql(DUE)
    assert len(await look(api)) == 1
    assert await api.sql("SELECT DISTINCT next_at > now() FROM shovel_schedules") == [(True,)]
    (record,) = [one for one in caplog.records if "open jobs" in one.message]
    assert "2 scheduled shovels" in record.message
    await api.sql("UPDATE jobs SET state = 'done'")
    await api.sql(DUE)
    assert len(await look(api)) == 2


async def test_an_organisation_has_a_limited_number_of_schedules(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shovel_schedules, "MAX_SCHEDULES", 1)
    first, second = await several(api, 2)
    for _ in range(2):
        answer = await api.call("PUT", schedule(first), json={"interval_s": 60})
        assert answer.status_code == 200
    refused = await api.call("PUT", schedule(second), json={"interval_s": 60})
    assert refused.status_code == 409
    assert refused.json()["limit"] == "shovel_schedules"
    # The schedule of a subscription that is deleted takes no place.
    assert (await api.call("DELETE", f"/subscriptions/{first['id']}")).status_code == 202
    answer = await api.call("PUT", schedule(second), json={"interval_s": 60})
    assert answer.status_code == 200


async def test_an_ended_term_requests_nothing(api: Api) -> None:
    subscription = await sidelined(api, 1)
    await api.call("PUT", schedule(subscription), json={"interval_s": 60})
    await api.sql(DUE)
    await ShovelScheduler(api.services.engine, api.services.clock, IdGenerator(lambda _: 1)).run(
        lambda: False
    )
    assert await api.sql("SELECT count(*) FROM jobs") == [(0,)]
