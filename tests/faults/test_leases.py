"""Leases under races, kills and restarts: no message is lost, and no lease settles what is not its own any more."""

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest

from rooms.db.schema import migrate
from rooms.errors import StorageUnavailableError
from tests.support.local_servers import temporary_postgres
from tests.support.pull_service import PATIENCE_S, Counter, open_counter, until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'rooms puller' AND wait_event_type = 'Lock'"
    " AND datname = current_database()"
)


@pytest.fixture
async def counter(database: str) -> AsyncIterator[Counter]:
    async with open_counter(database) as opened:
        yield opened


async def counted(counter: Counter, question: str) -> None:
    """Until PostgreSQL answers a count above nought."""
    await until(lambda: bool(counter.house.run(question)[0][0]))


def transaction(
    counter: Counter, statement: str, *values: str
) -> "psycopg.Connection[tuple[object, ...]]":
    """A transaction that is left open behind a statement."""
    connection = psycopg.connect(counter.house.url)
    connection.execute(cast(Any, statement), values)
    return connection


async def test_where_the_lease_ends_first_the_ack_is_late(counter: Counter) -> None:
    """The ack began while the lease was good and waits for its row; the expiry commits first.

    Oracle: the delivery is in the queue, one generation on, once. The ack changed nothing and
    reports that.
    """
    published = await counter.publish()
    (message,) = await counter.pull()
    ending = transaction(
        counter,
        "UPDATE leases SET until = now() - interval '1 ms' WHERE id = %s",
        message["delivery_id"],
    )
    acking = asyncio.create_task(counter.settle("ack", message["ack_id"]))
    await counted(counter, WAITING)
    ending.commit()
    ending.close()
    assert await acking == ["late"]
    assert await counter.ends.expire(limit=10) == (1, [counter.queue])
    assert counter.row(message["delivery_id"]) == ("queued", 1, 1, 1, None)
    assert counter.work() == {"outbox": 1, "held": 0, "leases": 0}
    assert [kind for kind, _, _ in counter.log(published)] == ["enqueued", "leased", "lease_ended"]


async def test_where_the_end_commits_while_the_ack_waits_the_ack_is_late(counter: Counter) -> None:
    """As above, with the whole end of the lease in the transaction that the ack waits for."""
    await counter.publish()
    (message,) = await counter.pull()
    ending = transaction(counter, "DELETE FROM leases WHERE id = %s", message["delivery_id"])
    ending.execute(
        "UPDATE deliveries SET state = 'queued', generation = 1, attempt = 1 WHERE id = %s",
        (message["delivery_id"],),
    )
    acking = asyncio.create_task(counter.settle("ack", message["ack_id"]))
    await counted(counter, WAITING)
    ending.commit()
    ending.close()
    assert await acking == ["late"]
    assert counter.row(message["delivery_id"]) == ("queued", 1, 1, 0, None)


async def test_where_the_ack_comes_first_the_lease_does_not_end(counter: Counter) -> None:
    """The ack has the lease's row and is delayed at the delivery's row until the lease has expired.

    Oracle: the expiry skips the lease, and the delivery is delivered once and stays so.
    """
    await counter.publish()
    (message,) = await counter.pull(lease_ms=600_000)
    holding = transaction(
        counter, "SELECT FROM deliveries WHERE id = %s FOR UPDATE", message["delivery_id"]
    )
    # So short that it ends while the ack waits, and long enough for the ack to begin.
    counter.house.run(
        "UPDATE leases SET until = now() + interval '4 s' WHERE id = %s", message["delivery_id"]
    )
    acking = asyncio.create_task(counter.settle("ack", message["ack_id"]))
    await counted(counter, WAITING)
    await counted(counter, "SELECT count(*) FROM leases WHERE until < clock_timestamp()")
    assert await counter.ends.expire(limit=10) == (0, [])
    holding.commit()
    holding.close()
    assert await acking == ["acked"]
    assert await counter.ends.expire(limit=10) == (0, [])
    assert counter.row(message["delivery_id"]) == ("delivered", 0, 0, 1, None)
    assert counter.work() == {"outbox": 0, "held": 0, "leases": 0}


async def test_two_concurrent_expirers_end_each_lease_once(database: str) -> None:
    """Oracle: every lease ended once, one log row and one queue row each."""
    async with open_counter(database) as here, open_counter(database, house=here.house) as there:
        for number in range(50):
            await here.publish(number)
        messages = await here.pull(max_messages=50)
        here.run_out(*(message["delivery_id"] for message in messages))
        ended = await asyncio.gather(*(who.ends.expire(limit=7) for who in (here, there) * 8))
        assert sum(count for count, _ in ended) == 50
        assert here.house.count("delivery_log WHERE kind = 'lease_ended'") == 50
        assert (
            here.house.count("deliveries WHERE state = 'queued' AND generation = 1 AND attempt = 1")
            == 50
        )
        assert here.work() == {"outbox": 50, "held": 0, "leases": 0}


async def test_acks_nacks_and_ends_of_the_same_leases_at_once_agree(database: str) -> None:
    """Oracle: each delivery ended one way, what each answer said happened, and the work tables hold just the rest."""
    async with open_counter(database) as here, open_counter(database, house=here.house) as there:
        for number in range(60):
            await here.publish(number)
        messages = await here.pull(max_messages=60, lease_ms=1000)
        ack_ids = [message["ack_id"] for message in messages]
        await counted(
            here, "SELECT count(*) FROM leases WHERE until < clock_timestamp() + interval '20 ms'"
        )
        (acked, nacked), ended = await asyncio.gather(
            asyncio.gather(
                here.settle("ack", *ack_ids),
                there.settle("nack", *reversed(ack_ids), queue=here.queue),
            ),
            asyncio.gather(*(here.ends.expire(limit=1000) for _ in range(5))),
        )
        nacked.reverse()
        for message, one, other in zip(messages, acked, nacked, strict=True):
            state, generation, attempt, attempts, _ = here.row(message["delivery_id"])
            assert attempts == attempt + (state == "delivered")
            if one == "acked":
                assert (state, generation, other) == ("delivered", 0, "late")
            elif other == "nacked":
                assert (state, generation, one) == ("queued", 1, "late")
            else:
                assert state in {"queued", "leased"}
        rows = {
            state: here.house.count(f"deliveries WHERE state = '{state}'")
            for state in ("queued", "leased")
        }
        assert here.work() == {"outbox": rows["queued"], "held": 0, "leases": rows["leased"]}
        assert (
            sum(count for count, _ in ended)
            + acked.count("acked")
            + nacked.count("nacked")
            + rows["leased"]
            == 60
        )


async def test_a_process_killed_between_take_and_answer_loses_nothing(counter: Counter) -> None:
    """Oracle: after its lease ended, the message that it took is pulled again, with the next attempt."""
    published = await counter.publish("precious")
    principal = counter.house.principal
    with subprocess.Popen(  # noqa: ASYNC220 - it starts at once
        [
            sys.executable, str(HERE / "hanging_consumer.py"), counter.house.url, principal.key_id,
            principal.organisation_id, counter.queue,
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            readable, _, _ = await asyncio.to_thread(
                select.select, [process.stdout], [], [], PATIENCE_S
            )
            assert readable
            assert process.stdout.readline() == b"taken 1\n"
        finally:
            process.kill()
    assert await counter.pull() == []
    await counted(counter, "SELECT count(*) FROM leases WHERE until < now()")
    assert await counter.ends.expire(limit=10) == (1, [counter.queue])
    (message,) = await counter.pull()
    assert (message["message_id"], message["payload"], message["attempt"]) == (
        published,
        "precious",
        1,
    )


async def test_postgresql_goes_and_comes_back(tmp_path: Path) -> None:
    """Oracle: waiting polls get the outage.

    Leases from before are good after it; nothing is lost or doubled.
    """
    data = tmp_path / "data"
    server = temporary_postgres(data)
    url = server.__enter__()
    try:
        migrate(url)
        async with open_counter(url) as counter:
            for number in range(3):
                await counter.publish(number)
            one, two = await counter.pull(max_messages=2, lease_ms=600_000)
            assert await counter.settle("ack", one["ack_id"]) == ["acked"]
            server.__exit__(None, None, None)
            with pytest.raises(StorageUnavailableError):
                await counter.pull(max_messages=1)
            with pytest.raises(StorageUnavailableError):
                await counter.settle("ack", two["ack_id"])
            server = temporary_postgres(data)
            assert server.__enter__() == url
            assert await counter.settle("ack", two["ack_id"]) == ["acked"]
            waiting = asyncio.create_task(counter.pull(max_messages=2, wait_ms=25_000))
            (three,) = await waiting
            assert three["payload"] == 2
            assert await counter.settle("ack", one["ack_id"], three["ack_id"]) == ["acked", "acked"]
            assert counter.house.count("delivery_log WHERE kind = 'pull_acked'") == 3
    finally:
        server.__exit__(None, None, None)


async def test_a_poll_that_waits_through_an_outage_gets_what_comes_after_it(
    counter: Counter,
) -> None:
    """Every connection of the process is cut while a poll rests. Oracle: it gets the message that is published then."""
    waiting = asyncio.create_task(counter.pull(wait_ms=25_000))
    await counter.a_client_waits()
    # It waits for the end of each: a session that is still ending may take a publish and refuse the
    # next one as well.
    counter.house.run(
        "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name <> 'rooms puller'"
    )
    with pytest.raises(StorageUnavailableError):
        await counter.publish("lost with its connection")
    assert counter.house.count("messages") == 0
    await counter.publish("after")
    (message,) = await waiting
    assert message["payload"] == "after"
