"""Test that a termination cancels what is unfinished, with that reason, and keeps the record."""

from delivery.maintenance.deletions import DeleteJob
from delivery.maintenance.jobs import JobRunner
from rooms.db.jobs.delete import DeleteQueries
from rooms.db.jobs.jobs import JobQueue
from rooms.db.writer import LogWriter
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    accepted,
    act,
    approve,
    history,
    member,
    pulled,
    shared_room,
    subscribe,
)

REASON = "subscription_terminated"


async def hold(api: Api, message: str, subscription: str) -> None:
    """Hold a queued delivery, as a worker does that finds its subscription suspended."""
    await api.sql(
        "WITH d AS (UPDATE deliveries SET state = 'held', reason = 'suspended'"
        " WHERE message_id = %s AND subscription_id = %s RETURNING id), o AS ("
        "DELETE FROM outbox USING d WHERE outbox.id = d.id RETURNING outbox.*)"
        " INSERT INTO held (room_id, id, subscription_id, reason, priority, delay_ms)"
        " SELECT room_id, id, subscription_id, 'suspended', priority, 0 FROM o",
        message,
        subscription,
    )


async def run_jobs(api: Api, writer: LogWriter) -> None:
    """Run the open jobs as maintenance does when no older publish is under way."""
    await api.sql("UPDATE jobs SET created_at = now() - interval '1 min'")
    queue = JobQueue(writer)
    runner = JobRunner(queue, DeleteJob(queue, DeleteQueries(writer), batch=2).handlers())
    for _ in range(2):  # one cancels, and the next finds nothing
        await runner.run(lambda: True)


async def test_a_termination_cancels_what_is_queued_held_and_leased(
    api: Api, writer: LogWriter
) -> None:
    owner, subscriber, other = [await member(api) for _ in range(3)]
    room = await shared_room(api, owner, subscription_policy="approval", visibility="listed")
    kept = await subscribe(api, other, room, "kept")
    ended = await subscribe(api, subscriber, room, "ended")
    for one in (kept, ended):
        await approve(api, owner, one["id"])
    path = f"/subscriptions/{ended['id']}"
    delivered = await accepted(api, owner.key, room)
    assert await pulled(api, subscriber, ended["id"]) == [delivered]
    leased = await accepted(api, owner.key, room)
    pull = {"max_messages": 1, "wait_ms": 0, "lease_ms": 60_000}
    (lease,) = (await api.call("POST", f"{path}/pull", subscriber.key, json=pull)).json()[
        "messages"
    ]
    assert lease["message_id"] == leased
    held = await accepted(api, owner.key, room)
    await hold(api, held, ended["id"])
    queued = [await accepted(api, owner.key, room) for _ in range(2)]
    unfinished = [leased, held, *queued]

    async def deliveries(subscription: str) -> dict[str, tuple[str, str | None]]:
        rows = await api.sql(
            "SELECT message_id::text, state::text, reason FROM deliveries WHERE subscription_id = %s",
            subscription,
        )
        return {message: (state, reason) for message, state, reason in rows}

    before = await deliveries(ended["id"])
    assert [before[one][0] for one in unfinished] == ["leased", "held", "queued", "queued"]
    answer = await act(api, owner, ended["id"], "terminate", reason="the contract ended")
    assert answer.status_code == 200, answer.text
    await run_jobs(api, writer)

    assert await api.sql("SELECT kind, state::text, error FROM jobs") == [
        ("terminate_subscription", "done", None)
    ]
    assert await deliveries(ended["id"]) == {
        delivered: ("delivered", None),
        **dict.fromkeys(unfinished, ("cancelled", REASON)),
    }
    assert set((await deliveries(kept["id"])).values()) == {("queued", None)}
    for table in ("outbox", "held", "leases"):
        left = await api.sql(f"SELECT id FROM {table} WHERE subscription_id = %s", ended["id"])
        assert left == [], table
    logged = await api.sql(
        "SELECT message_id::text, detail FROM delivery_log WHERE kind = 'cancelled' ORDER BY 1"
    )
    assert logged == [(one, REASON) for one in sorted(unfinished)]
    acks = {"ack_ids": [lease["ack_id"]]}
    late = await api.call("POST", f"{path}/ack", subscriber.key, json=acks)
    assert (late.status_code, late.json()["results"][0]["status"]) == (409, "late")
    for reader in (owner, subscriber):
        found = await history(api, reader, ended["id"])
        last = found[-1]
        assert (last["action"], last["status"]) == ("terminated", "terminated")
        assert last["reason"] == "the contract ended"
