"""A sideline that is shoveled by itself: what is set, what is due, and that each time it is asked for once (row B4)."""

import asyncio
from typing import Any

import pytest

from delivery.sideline.schedule import ScheduledShovels
from rooms.domain.ids import IdMaker
from tests.rest.conftest import Api
from tests.rest.test_sideline import sidelined

DUE = "UPDATE shovel_schedules SET next_at = now() - interval '1 second'"


def schedule(subscription: dict[str, Any]) -> str:
    return f"/subscriptions/{subscription['id']}/sideline/schedule"


async def look(api: Api) -> list[dict[str, Any]]:
    """One turn of the duty; every shovel that is asked for by now, the newest first."""
    await ScheduledShovels(api.services.engine, api.services.clock, api.services.ids).run(lambda: True)
    jobs: list[dict[str, Any]] = (await api.call("GET", "/jobs")).json()["items"]
    return [job for job in jobs if job["kind"] == "shovel_sideline"]


@pytest.mark.row("B4")
async def test_a_schedule_is_set_shown_replaced_and_taken_away(api: Api) -> None:
    subscription = await sidelined(api, 1)
    path = schedule(subscription)
    assert (await api.call("GET", path)).status_code == 404
    made = (await api.call("PUT", path, "operate", json={"interval_s": 60})).json()
    assert (made["interval_s"], made["rate_per_s"], made["concurrency"], made["max_shovels"]) == (60, None, 4, 3)
    other = {"interval_s": 600, "rate_per_s": 2.5, "concurrency": 1, "max_shovels": 9}
    replaced = (await api.call("PUT", path, json=other)).json()
    assert replaced == other | {"next_at": replaced["next_at"]}
    assert replaced["next_at"] > made["next_at"]
    assert (await api.call("GET", path)).json() == replaced
    for _ in range(2):
        assert (await api.call("DELETE", path)).status_code == 204
    assert (await api.call("GET", path)).status_code == 404
    for body in ({}, {"interval_s": 0}, {"interval_s": 60, "concurrency": 17}, {"interval_s": 60, "rate_per_s": 0}):
        assert (await api.call("PUT", path, json=body)).status_code == 422, body


@pytest.mark.row("B4")
async def test_what_is_due_is_asked_for_once_and_again_after_the_interval(api: Api) -> None:
    subscription = await sidelined(api)
    body = {"interval_s": 600, "rate_per_s": 7, "max_shovels": 2}
    await api.call("PUT", schedule(subscription), json=body)
    assert await look(api) == []
    await api.sql(DUE)
    # Two members that look at the same moment: one of them finds it.
    await asyncio.gather(*(look(api) for _ in range(4)))
    (job,) = await look(api)
    wanted = {"rate_per_s": 7, "max_shovels": 2, "subscription_id": subscription["id"]}
    assert job["arguments"].items() >= wanted.items()
    assert job["state"] == "queued"
    # While that one is not over there is no other, however long the interval has passed.
    await api.sql(DUE)
    assert len(await look(api)) == 1
    await api.sql("UPDATE jobs SET state = 'done'")
    assert len(await look(api)) == 1
    await api.sql(DUE)
    assert len(await look(api)) == 2


@pytest.mark.row("B4")
async def test_an_empty_sideline_is_left_in_peace_and_a_deleted_one_forgotten(api: Api) -> None:
    subscription = await sidelined(api, 1)
    await api.call("PUT", schedule(subscription), json={"interval_s": 60})
    await api.sql("DELETE FROM sidelined")
    await api.sql(DUE)
    assert await look(api) == []
    assert await api.sql("SELECT next_at > now() FROM shovel_schedules") == [(True,)]
    assert (await api.call("DELETE", f"/subscriptions/{subscription['id']}")).status_code == 202
    assert await look(api) == []
    assert await api.sql("SELECT 1 FROM shovel_schedules") == []


async def test_a_turn_that_is_over_asks_for_nothing(api: Api) -> None:
    subscription = await sidelined(api, 1)
    await api.call("PUT", schedule(subscription), json={"interval_s": 60})
    await api.sql(DUE)
    await ScheduledShovels(api.services.engine, api.services.clock, IdMaker(lambda _: 1)).run(lambda: False)
    assert await api.sql("SELECT count(*) FROM jobs") == [(0,)]
