"""Test redelivery from every state, and what is written."""

import asyncio
from typing import Any

import pytest

from rooms.domain.state_machine import Event, State, states_allowing
from tests.integration.rooms.api.conftest import Api

AGAIN = states_allowing(Event.SHOVEL) | states_allowing(Event.RESTORE)


async def delivery_in(api: Api, state: State, kind: str = "PUSH", **room: Any) -> dict[str, Any]:
    """Create a delivery in a room of its own, set to `state` in SQL and without its work row."""
    made = await api.room(f"{state}-{kind}", **room)
    await api.made(f"/rooms/{made['id']}/event-types", {"name": "made"})
    await api.subscription(made["id"], type=kind)
    message = (await api.publish(made["id"], "made", {}, priority=7))["message_id"]
    found: dict[str, Any] = (await api.call("GET", f"/messages/{message}/deliveries")).json()[
        "items"
    ][0]
    await api.sql("DELETE FROM outbox WHERE id = %s RETURNING 1", found["id"])
    await api.sql(
        "UPDATE deliveries SET state = %s, attempt = 3, attempts = 4, generation = 2, reason = 'nacked', due_at = NULL,"
        " last_error = 'x' WHERE id = %s RETURNING 1",
        state,
        found["id"],
    )
    return found


async def work(api: Api, delivery: dict[str, Any]) -> list[tuple[Any, ...]]:
    return await api.sql(
        "SELECT kind, priority, generation, attempt, due_at <= now() FROM outbox WHERE id = %s",
        delivery["id"],
    )


async def last_step(api: Api, delivery: dict[str, Any]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = (
        await api.call("GET", f"/messages/{delivery['message_id']}/journey")
    ).json()["items"]
    return steps[-1]


async def test_sidelined_and_ended_deliveries_are_queued_again(api: Api) -> None:
    for state in sorted(AGAIN):
        for number, kind in enumerate(("PUSH", "PULL")):
            before = await delivery_in(api, state, kind)
            answer = await api.call("POST", f"/deliveries/{before['id']}/redeliver", "operate")
            assert answer.status_code == 200, answer.text
            after = answer.json()
            expected = {
                "state": "queued",
                "generation": 3,
                "attempt": 0,
                "attempts": 4,
                "reason": None,
            }
            assert {name: after[name] for name in expected} == expected
            assert after["next_attempt_at"] is not None
            assert await work(api, before) == [(number, 7, 3, 0, True)]
            step = await last_step(api, before)
            assert step["kind"] == ("shoveled" if state is State.SIDELINED else "restored")
            assert (step["generation"], step["attempt"], step["event_type"]) == (3, 0, "made")


async def test_no_other_delivery_is_queued_again(api: Api) -> None:
    for state in sorted(set(State) - AGAIN):
        before = await delivery_in(api, state)
        answer = await api.call("POST", f"/deliveries/{before['id']}/redeliver")
        assert answer.status_code == 409
        assert str(state) in answer.json()["detail"]
        assert await work(api, before) == []
        assert (await last_step(api, before))["kind"] == "enqueued"
        assert (await api.call("GET", f"/deliveries/{before['id']}")).json()["generation"] == 2


@pytest.mark.parametrize(("own_ms", "life_s"), [(None, 60), (7_000, 7), (90_000, 60)])
async def test_a_shovel_keeps_the_lifetime_and_a_restore_renews_it(
    api: Api, own_ms: int | None, life_s: int
) -> None:
    for state, renewed in ((State.SIDELINED, False), (State.EXPIRED, True)):
        before = await delivery_in(api, state, message_expiration_ms=60_000)
        old = (
            await api.sql(
                "UPDATE deliveries SET expires_at = now() + interval '1 h' WHERE id = %s RETURNING expires_at",
                before["id"],
            )
        )[0]
        await api.sql("UPDATE subscriptions SET message_expiration_ms = %s", own_ms)
        await api.call("POST", f"/deliveries/{before['id']}/redeliver")
        rows = await api.sql(
            "SELECT d.expires_at = %s, d.expires_at - d.due_at, o.expires_at = d.expires_at"
            " FROM deliveries d JOIN outbox o USING (room_id, id) WHERE d.id = %s",
            old[0],
            before["id"],
        )
        kept, lifetime, same = rows[0]
        assert kept is not renewed
        assert same
        assert not renewed or lifetime.total_seconds() == life_s


async def test_a_fresh_lifetime_is_at_most_the_quota_of_the_organisation(api: Api) -> None:
    before = await delivery_in(api, State.EXPIRED)
    await api.sql("UPDATE organisations SET quotas = '{\"expiration_ms\": 60000}'")
    await api.call("POST", f"/deliveries/{before['id']}/redeliver")
    rows = await api.sql(
        "SELECT extract(epoch FROM d.expires_at - d.due_at)::int, o.expires_at = d.expires_at"
        " FROM deliveries d JOIN outbox o USING (room_id, id) WHERE d.id = %s",
        before["id"],
    )
    assert rows == [(60, True)]


async def test_a_delivery_that_expired_in_the_sideline_ends_and_can_be_restored(api: Api) -> None:
    before = await delivery_in(api, State.SIDELINED)
    await api.sql(
        "UPDATE deliveries SET expires_at = now() - interval '1 s' WHERE id = %s RETURNING 1",
        before["id"],
    )
    answer = await api.call("POST", f"/deliveries/{before['id']}/redeliver")
    assert answer.status_code == 409
    found = (await api.call("GET", f"/deliveries/{before['id']}")).json()
    assert (found["state"], found["reason"], found["next_attempt_at"]) == (
        "expired",
        "too_late",
        None,
    )
    assert (await last_step(api, before))["kind"] == "expired"
    assert await work(api, before) == []
    answer = await api.call("POST", f"/deliveries/{before['id']}/redeliver")
    assert (answer.status_code, answer.json()["expires_at"]) == (200, None)


async def test_a_delivery_without_its_subscription_is_not_resent(api: Api) -> None:
    before = await delivery_in(api, State.CANCELLED)
    await api.call("DELETE", f"/subscriptions/{before['subscription_id']}")
    answer = await api.call("POST", f"/deliveries/{before['id']}/redeliver")
    assert answer.status_code == 409
    assert "deleted" in answer.json()["detail"]
    assert await work(api, before) == []


async def test_concurrent_redeliveries_count_once(api: Api) -> None:
    before = await delivery_in(api, State.SIDELINED)
    answers = await asyncio.gather(
        *(api.call("POST", f"/deliveries/{before['id']}/redeliver") for _ in range(8))
    )
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 7
    assert await work(api, before) == [(0, 7, 3, 0, True)]


async def test_the_log_of_a_writer_has_no_gap(api: Api) -> None:
    for state in (State.SIDELINED, State.QUEUED, State.EXPIRED, State.DELIVERED, State.DROPPED):
        before = await delivery_in(api, state)
        await api.call("POST", f"/deliveries/{before['id']}/redeliver")
    rows = await api.sql(
        "SELECT writer_seq FROM delivery_log WHERE writer_id = %s ORDER BY 1",
        api.services.writer.id,
    )
    assert [row[0] for row in rows] == [1, 2, 3]
