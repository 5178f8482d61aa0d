"""Test scheduled shovels: the settings, what is due, and that each is requested once."""

import asyncio
from typing import Any

from delivery.sideline.tasks import ShovelScheduler
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


async def test_an_ended_term_requests_nothing(api: Api) -> None:
    subscription = await sidelined(api, 1)
    await api.call("PUT", schedule(subscription), json={"interval_s": 60})
    await api.sql(DUE)
    await ShovelScheduler(api.services.engine, api.services.clock, IdGenerator(lambda _: 1)).run(
        lambda: False
    )
    assert await api.sql("SELECT count(*) FROM jobs") == [(0,)]
