"""Test pull, ack, nack and extend over a database."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from delivery.maintenance.expiry import DeliveryExpirer
from delivery.pull.requests import ack_id, parse_ack_id
from delivery.pull.target import PullSelection, parse_target
from rooms.clock import SystemClock
from rooms.db.leases.acquire import MAX_BYTES
from rooms.db.queue.expire import ExpiryQueries
from rooms.db.writer import LogWriter
from rooms.domain.ids import OrganisationId
from rooms.errors import (
    ConflictError,
    InvalidError,
    LeaseExpiredError,
    MalformedError,
    NotFoundError,
    RoomsError,
)
from tests.support.fake_broker import MemoryBroker
from tests.support.pull_service import Counter, open_counter

LONG_MS = 25_000
NEVER = b"\xff" * 16


SHAPES = [pytest.param("embedded", id="embedded"), pytest.param("relayed", id="relayed")]
embedded_only = pytest.mark.parametrize("broker", ["embedded"], indirect=True)


@pytest.fixture(params=SHAPES)
def broker(request: pytest.FixtureRequest) -> MemoryBroker | None:
    """Return the broker that carries the copies: PostgreSQL (None), or another."""
    return MemoryBroker() if request.param == "relayed" else None


@pytest.fixture
async def counter(database: str, broker: MemoryBroker | None) -> AsyncIterator[Counter]:
    async with open_counter(database, broker=broker) as opened:
        yield opened


async def fetch(counter: Counter, **fields: Any) -> dict[str, Any]:
    """Pull the only message."""
    (message,) = await counter.pull(**fields)
    return message


async def test_a_pulled_message_has_everything_and_the_very_bytes_that_were_published(
    counter: Counter,
) -> None:
    payload = b'{"n": 1.10,  "big":12345678901234567890123,"u":"\\u00e9\xc3\xa9"}'
    body = b'{"event_type":"order.created","correlation_id":"a\\"b\\"\\\\","headers":{"tenant":"7"},"payload":%b}'
    message_id = await counter.publish_bytes(body % payload)
    answer = await counter.pull_bytes()
    assert payload in answer
    (message,) = json.loads(answer)["messages"]
    ((delivery_id,),) = counter.house.run("SELECT id::text FROM deliveries")
    ((published_at,),) = counter.house.run("SELECT published_at FROM messages")
    assert message == {
        "ack_id": message["ack_id"],
        "delivery_id": delivery_id,
        "message_id": message_id,
        "attempt": 0,
        "event_type": "order.created",
        "version": 1,
        "correlation_id": 'a"b"\\',
        "published_at": published_at.isoformat().replace("+00:00", "Z"),
        "priority": 4,
        "delay_ms": 0,
        "lease_until": message["lease_until"],
        "publisher": {"organisation_id": counter.house.principal.organisation_id},
        "payload": json.loads(payload),
        "headers": {"tenant": "7"},
    }


async def test_omitted_fields_are_left_out_or_have_the_message_s_values(
    counter: Counter,
) -> None:
    message_id = await counter.publish(None)
    message = await fetch(counter)
    assert "headers" not in message
    assert message["correlation_id"] == message_id
    assert message["payload"] is None


@embedded_only
async def test_a_delivery_without_a_message_is_sidelined_and_does_not_block(
    counter: Counter,
) -> None:
    for payload in ("gone", "gone too", "there"):
        await counter.publish(payload)
    counter.house.run("DELETE FROM messages WHERE payload <> '\"there\"'::bytea")
    assert (await fetch(counter, max_messages=1, wait_ms=LONG_MS))["payload"] == "there"
    assert counter.house.count("deliveries WHERE state = 'sidelined' AND reason = 'orphan'") == 2
    assert counter.house.count("outbox WHERE kind = 1") == 0


async def test_the_highest_priority_comes_first_then_what_was_due_first(counter: Counter) -> None:
    for payload, priority in (("a", 4), ("b", 9), ("c", 0), ("d", 4), ("e", 9)):
        await counter.publish(payload, priority=priority)
    first = await counter.pull(max_messages=3)
    rest = await counter.pull()
    assert [message["payload"] for message in first + rest] == ["b", "e", "a", "d", "c"]
    assert await counter.pull() == []


async def test_an_ack_delivers_and_leaves_nothing_to_do(counter: Counter) -> None:
    published = await counter.publish()
    message = await fetch(counter)
    assert counter.row(message["delivery_id"]) == ("leased", 0, 0, 0, None)
    assert counter.work() == {"outbox": 0, "held": 0, "leases": 1}
    assert await counter.settle("ack", message["ack_id"]) == ["acked"]
    assert counter.row(message["delivery_id"]) == ("delivered", 0, 0, 1, None)
    assert counter.work() == {"outbox": 0, "held": 0, "leases": 0}
    assert counter.log(published) == [("enqueued", 0, 0), ("leased", 0, 0), ("pull_acked", 0, 0)]


async def test_every_step_is_logged_with_its_correlation_and_type(counter: Counter) -> None:
    await counter.publish(correlation_id="c-1")
    await counter.settle("nack", (await fetch(counter))["ack_id"])
    first = await fetch(counter)
    counter.run_out(first["delivery_id"])
    await counter.ends.expire(limit=10)
    await counter.settle("ack", (await fetch(counter))["ack_id"])
    rows = counter.house.run(
        "SELECT kind, correlation_id, event_type, event_version, subscription_id::text, delay_ms FROM delivery_log"
        " WHERE delivery_id IS NOT NULL AND kind <> 'enqueued' ORDER BY ts, writer_seq"
    )
    same = ("c-1", "order.created", 1, counter.queue)
    assert rows == [
        ("leased", *same, None),
        ("nacked", *same, 0),
        ("leased", *same, None),
        ("lease_ended", *same, 0),
        ("leased", *same, None),
        ("pull_acked", *same, None),
    ]
    gaps = "SELECT FROM delivery_log GROUP BY writer_id HAVING count(*) <> max(writer_seq) OR min(writer_seq) <> 1"
    assert counter.house.run(gaps) == []


async def test_an_ack_that_is_repeated_is_acked_and_changes_nothing_more(counter: Counter) -> None:
    await counter.publish()
    message = await fetch(counter)
    assert await counter.settle("ack", message["ack_id"]) == ["acked"]
    assert await counter.settle("ack", message["ack_id"]) == ["acked"]
    assert await counter.settle("nack", message["ack_id"]) == ["late"]
    assert await counter.settle("extend", message["ack_id"], lease_ms=1000) == ["late"]
    assert counter.row(message["delivery_id"]) == ("delivered", 0, 0, 1, None)


async def test_duplicate_ack_ids_in_one_request_count_once(counter: Counter) -> None:
    for _ in range(2):
        await counter.publish()
    one, two = await counter.pull()
    statuses = await counter.settle("ack", one["ack_id"], two["ack_id"], one["ack_id"])
    assert statuses == ["acked", "acked", "acked"]
    assert counter.row(one["delivery_id"])[3] == 1
    assert counter.house.count("delivery_log WHERE kind = 'pull_acked'") == 2


async def test_a_nacked_message_is_redelivered_under_another_lease(counter: Counter) -> None:
    published = await counter.publish()
    first = await fetch(counter)
    assert await counter.settle("nack", first["ack_id"]) == ["nacked"]
    assert counter.row(first["delivery_id"]) == ("queued", 1, 1, 1, None)
    second = await fetch(counter)
    assert (second["delivery_id"], second["attempt"]) == (first["delivery_id"], 1)
    assert second["ack_id"] != first["ack_id"]
    assert await counter.settle("ack", first["ack_id"]) == ["late"]
    assert counter.row(first["delivery_id"]) == ("leased", 1, 1, 1, None)
    assert await counter.settle("ack", second["ack_id"]) == ["acked"]
    assert [kind for kind, _, _ in counter.log(published)] == [
        "enqueued",
        "leased",
        "nacked",
        "leased",
        "pull_acked",
    ]


@embedded_only
async def test_a_message_nacked_with_a_delay_is_invisible_until_due(
    counter: Counter,
) -> None:
    await counter.publish(priority=7)
    message = await fetch(counter)
    await counter.settle("nack", message["ack_id"], delay_ms=3_600_000)
    assert await counter.pull() == []
    ((priority, delay_ms, waits),) = counter.house.run(
        "SELECT priority, delay_ms, due_at > now() + interval '59 minutes' FROM outbox"
    )
    assert (priority, delay_ms, waits) == (7, 3_600_000, True)
    counter.house.run("UPDATE outbox SET due_at = now()")
    assert (await fetch(counter))["attempt"] == 1


@pytest.mark.parametrize("how", ["nack", "end"])
async def test_a_message_is_sidelined_after_max_receives(counter: Counter, how: str) -> None:
    counter.house.run("UPDATE subscriptions SET max_receives = 2")
    published = await counter.publish()
    identity = ""
    for state in ("queued", "sidelined"):
        message = await fetch(counter)
        identity = message["delivery_id"]
        if how == "nack":
            assert await counter.settle("nack", message["ack_id"], delay_ms=0) == ["nacked"]
        else:
            counter.run_out(message["delivery_id"])
            assert await counter.ends.expire(limit=10) == (
                1,
                [counter.queue] if state == "queued" else [],
            )
        assert counter.row(message["delivery_id"])[0] == state
    assert counter.row(identity) == ("sidelined", 2, 2, 2, "nacked")
    assert counter.work() == {"outbox": 0, "held": 0, "leases": 0}
    assert counter.log(published)[-1] == ("sidelined", 2, 2)
    assert await counter.pull() == []


async def test_a_message_that_was_leased_and_not_sent_counts_no_receive(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the client leave when its lease is committed: it never saw the only receive allowed."""
    counter.house.run("UPDATE subscriptions SET max_receives = 1")
    published = await counter.publish()
    source = counter.puller._source
    acquire, left = source.acquire, False

    async def acquire_and_leave(requests: Any) -> Any:
        nonlocal left
        found = await acquire(requests)
        if any(outcome.messages for outcome in found) and not left:
            left = True
            task.cancel()
        return found

    monkeypatch.setattr(source, "acquire", acquire_and_leave)
    task = asyncio.create_task(counter.pull(wait_ms=LONG_MS))
    with pytest.raises(asyncio.CancelledError):
        await task
    message = await fetch(counter, wait_ms=LONG_MS)
    assert (message["message_id"], message["attempt"]) == (published, 0)
    assert counter.row(message["delivery_id"]) == ("leased", 1, 0, 0, None)
    assert await counter.settle("ack", message["ack_id"]) == ["acked"]
    assert counter.log(published) == [
        ("enqueued", 0, 0),
        ("leased", 0, 0),
        ("released", 1, 0),
        ("leased", 1, 0),
        ("pull_acked", 1, 0),
    ]


async def test_a_message_that_would_be_redelivered_after_its_expiry_expires(
    counter: Counter,
) -> None:
    published = await counter.publish(ttl_ms=60_000)
    message = await fetch(counter)
    assert await counter.settle("nack", message["ack_id"], delay_ms=61_000) == ["nacked"]
    assert counter.row(message["delivery_id"]) == ("expired", 0, 0, 1, "too_late")
    assert counter.work() == {"outbox": 0, "held": 0, "leases": 0}
    assert [kind for kind, _, _ in counter.log(published)] == ["enqueued", "leased", "expired"]


async def test_an_expired_message_is_not_leased(counter: Counter) -> None:
    await counter.publish("gone")
    await counter.publish("there")
    for table in ("outbox", "deliveries"):
        counter.house.run(
            f"UPDATE {table} SET expires_at = now() - interval '1 s' WHERE id = (SELECT min(id::text)::uuid FROM {table})"
        )
    assert [message["payload"] for message in await counter.pull()] == ["there"]


async def lease_an_expired_message(counter: Counter) -> dict[str, Any]:
    """A message that expired under its lease, after maintenance looked for what to expire."""
    await counter.publish(ttl_ms=1_800_000)
    message = await fetch(counter, lease_ms=3_600_000)
    until = datetime.fromisoformat(message["lease_until"])
    assert until > datetime.fromisoformat(message["expires_at"])
    assert counter.house.run("SELECT until FROM leases") == [(until,)]
    counter.house.run("UPDATE deliveries SET expires_at = now() - interval '1 ms'")
    async with LogWriter(counter.house.url, kind="chores") as writer:
        await DeliveryExpirer(ExpiryQueries(writer), SystemClock()).run(lambda: True)
    assert counter.row(message["delivery_id"])[0] == "leased"
    return message


async def test_what_expires_under_a_lease_can_still_be_acknowledged(counter: Counter) -> None:
    """The work is done: recorded as expired, the publisher would believe that it is not."""
    message = await lease_an_expired_message(counter)
    assert await counter.settle("extend", message["ack_id"], lease_ms=7_200_000) == ["extended"]
    assert await counter.pull() == []
    assert await counter.settle("ack", message["ack_id"]) == ["acked"]
    assert counter.row(message["delivery_id"])[0] == "delivered"


async def test_what_expired_under_a_lease_expires_when_the_lease_ends(counter: Counter) -> None:
    message = await lease_an_expired_message(counter)
    counter.run_out(message["delivery_id"])
    assert await counter.ends.expire(limit=10) == (1, [])
    assert counter.row(message["delivery_id"]) == ("expired", 0, 0, 1, None)
    assert await counter.settle("ack", message["ack_id"]) == ["late"]


async def test_what_expired_under_a_lease_expires_when_it_is_given_back(counter: Counter) -> None:
    message = await lease_an_expired_message(counter)
    assert await counter.settle("nack", message["ack_id"]) == ["nacked"]
    assert counter.row(message["delivery_id"]) == ("expired", 0, 0, 1, None)
    assert counter.work() == {"outbox": 0, "held": 0, "leases": 0}


async def test_an_extended_lease_ends_when_it_was_extended_to(counter: Counter) -> None:
    await counter.publish()
    message = await fetch(counter, lease_ms=60_000)
    assert await counter.settle("extend", message["ack_id"], lease_ms=3_600_000) == ["extended"]
    left = "SELECT until - now() BETWEEN interval '59 min' AND interval '60 min' FROM leases"
    assert counter.house.run(left) == [(True,)]
    assert await counter.settle("ack", message["ack_id"]) == ["acked"]


async def test_everything_is_late_after_the_lease_time_even_before_the_lease_is_ended(
    counter: Counter,
) -> None:
    await counter.publish()
    message = await fetch(counter)
    counter.run_out(message["delivery_id"])
    assert await counter.settle("ack", message["ack_id"]) == ["late"]
    assert await counter.settle("nack", message["ack_id"]) == ["late"]
    assert await counter.settle("extend", message["ack_id"], lease_ms=1000) == ["late"]
    assert counter.row(message["delivery_id"]) == ("leased", 0, 0, 0, None)
    assert await counter.ends.expire(limit=10) == (1, [counter.queue])
    assert await counter.ends.expire(limit=10) == (0, [])
    again = await fetch(counter)
    assert (again["delivery_id"], again["attempt"]) == (message["delivery_id"], 1)


async def test_leases_end_the_oldest_first_a_batch_at_a_time(counter: Counter) -> None:
    for number in range(5):
        await counter.publish(number)
    messages = await counter.pull()
    for age, message in enumerate(messages):
        counter.house.run(
            f"UPDATE leases SET until = now() - interval '{age + 1} s' WHERE id = %s",
            message["delivery_id"],
        )
    assert await counter.ends.expire(limit=2) == (2, [counter.queue])
    assert {message["payload"] for message in await counter.pull()} == {3, 4}
    assert (await counter.ends.expire(limit=10))[0] == 3


async def test_each_ack_id_of_a_mixed_request_gets_its_own_result(counter: Counter) -> None:
    other = counter.house.subscription(counter.room, "PULL")
    for number in range(3):
        await counter.publish(number)
    fresh, late, waiting = await counter.pull()
    theirs = (await counter.pull(queue=other))[0]
    counter.run_out(late["delivery_id"], waiting["delivery_id"])
    counter.house.run(
        "UPDATE leases SET until = now() + interval '1 h' WHERE id = %s", waiting["delivery_id"]
    )
    delivery, generation = parse_ack_id(fresh["ack_id"])
    to_come = ack_id(delivery, (7).to_bytes(4, "big")).decode()
    made_up = ack_id(NEVER, generation).decode()
    statuses = await counter.settle(
        "ack", late["ack_id"], theirs["ack_id"], to_come, made_up, fresh["ack_id"]
    )
    assert statuses == ["late", "unknown", "unknown", "unknown", "acked"]
    assert counter.row(theirs["delivery_id"])[0] == "leased"
    assert await counter.settle("ack", theirs["ack_id"], queue=other) == ["acked"]


async def test_an_ack_id_of_a_lease_that_never_was_is_unknown(counter: Counter) -> None:
    """The delivery exists at this generation, but was never pulled."""
    await counter.publish()
    ((identity,),) = counter.house.run("SELECT id FROM deliveries")
    made_up = ack_id(bytes.fromhex(str(identity).replace("-", "")), bytes(4)).decode()
    assert await counter.settle("ack", made_up) == ["unknown"]
    assert counter.row(str(identity))[0] == "queued"


@pytest.mark.parametrize("how", ["ack", "nack", "extend"])
async def test_a_request_whose_ids_are_all_late_is_a_conflict_with_results(
    counter: Counter, how: str
) -> None:
    await counter.publish()
    message = await fetch(counter)
    counter.run_out(message["delivery_id"])
    body = {"ack_ids": [message["ack_id"]] * 2} | ({"lease_ms": 1000} if how == "extend" else {})
    with pytest.raises(LeaseExpiredError) as caught:
        await getattr(counter.puller, how)(
            counter.house.principal, counter.queue, json.dumps(body).encode()
        )
    assert caught.value.results == ((message["ack_id"], "late"),) * 2


@pytest.mark.parametrize(
    ("how", "body", "fields"),
    [
        ("pull", b'{"max_messages": 0}', ["max_messages"]),
        ("pull", b'{"max_messages": 1001}', ["max_messages"]),
        ("pull", b'{"wait_ms": 30001}', ["wait_ms"]),
        ("pull", b'{"wait_ms": -1}', ["wait_ms"]),
        ("pull", b'{"lease_ms": 999}', ["lease_ms"]),
        ("pull", b'{"lease_ms": 43200001}', ["lease_ms"]),
        ("pull", b'{"lease": 1}', ["lease"]),
        ("pull", b"[]", ["body"]),
        ("ack", b"{}", ["ack_ids"]),
        ("ack", b'{"ack_ids": []}', ["ack_ids"]),
        ("ack", b'{"ack_ids": [1]}', ["ack_ids[0]"]),
        ("ack", b'{"ack_ids": ["x", "y"]}', ["ack_ids[0]", "ack_ids[1]"]),
        ("nack", b'{"ack_ids": ["x"], "delay_ms": -1}', ["delay_ms"]),
        ("extend", b'{"ack_ids": ["x"]}', ["lease_ms"]),
        ("extend", b'{"ack_ids": ["x"], "lease_ms": 1}', ["lease_ms"]),
    ],
)
async def test_a_problem_is_named_by_its_field(
    counter: Counter, how: str, body: bytes, fields: list[str]
) -> None:
    with pytest.raises(InvalidError) as caught:
        await getattr(counter.puller, how)(counter.house.principal, counter.queue, body)
    assert [problem.field for problem in caught.value.problems] == fields


async def test_one_malformed_ack_id_is_named_by_its_index_and_nothing_is_acked(
    counter: Counter,
) -> None:
    await counter.publish()
    message = await fetch(counter)
    body = json.dumps({"ack_ids": [message["ack_id"], message["delivery_id"]]}).encode()
    with pytest.raises(InvalidError) as caught:
        await counter.puller.ack(counter.house.principal, counter.queue, body)
    assert [problem.field for problem in caught.value.problems] == ["ack_ids[1]"]
    assert counter.row(message["delivery_id"])[0] == "leased"


async def test_a_thousand_and_one_ack_ids_are_too_many(counter: Counter) -> None:
    body = json.dumps({"ack_ids": [ack_id(NEVER, bytes(4)).decode()] * 1001}).encode()
    with pytest.raises(InvalidError, match="ack_ids"):
        await counter.puller.ack(counter.house.principal, counter.queue, body)


async def test_an_invalid_body_is_malformed_and_an_empty_one_asks_for_the_defaults(
    counter: Counter,
) -> None:
    for body in (b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(MalformedError):
            await counter.puller.pull(counter.house.principal, counter.queue, body)
    for body in (b"", b'{"max_messages": 5.0, "wait_ms": 0.0}'):
        assert await counter.puller.pull(counter.house.principal, counter.queue, body) == (
            200,
            b'{"messages":[]}',
        )


BODIES = {
    "pull": b"{}",
    "ack": json.dumps({"ack_ids": [ack_id(NEVER, bytes(4)).decode()]}).encode(),
    "nack": json.dumps({"ack_ids": [ack_id(NEVER, bytes(4)).decode()]}).encode(),
    "extend": json.dumps(
        {"ack_ids": [ack_id(NEVER, bytes(4)).decode()], "lease_ms": 1000}
    ).encode(),
}


async def refused(
    counter: Counter, queue: str, kind: type[RoomsError], organisation: str | None = None
) -> None:
    """Check that every call is refused with this error, whether its body is valid or not."""
    principal = counter.house.principal
    if organisation is not None:
        principal = replace(principal, organisation_id=OrganisationId(organisation))
    for how, body in BODIES.items():
        for sent in (body, b'{"no": "such field"}', b"{"):
            with pytest.raises(kind):
                await getattr(counter.puller, how)(principal, queue, sent)


async def test_a_subscription_of_another_organisation_does_not_exist(counter: Counter) -> None:
    await counter.publish()
    await refused(counter, counter.queue, NotFoundError, str(uuid.uuid4()))
    assert counter.work()["outbox"] == 1


async def test_another_organisation_settles_nothing(counter: Counter) -> None:
    await counter.publish()
    message = await fetch(counter)
    stranger = replace(counter.house.principal, organisation_id=OrganisationId(str(uuid.uuid4())))
    body = {"ack_ids": [message["ack_id"]]}
    for how, fields in (("ack", {}), ("nack", {}), ("extend", {"lease_ms": 1000})):
        with pytest.raises(NotFoundError):
            await getattr(counter.puller, how)(
                stranger, counter.queue, json.dumps(body | fields).encode()
            )
    assert counter.row(message["delivery_id"]) == ("leased", 0, 0, 0, None)
    together = await asyncio.gather(
        counter.puller.ack(stranger, counter.queue, json.dumps(body).encode()),
        counter.puller.ack(counter.house.principal, counter.queue, json.dumps(body).encode()),
        return_exceptions=True,
    )
    assert isinstance(together[0], NotFoundError)
    assert counter.row(message["delivery_id"])[0] == "delivered"


@pytest.mark.parametrize("text", ["x", "", "0" * 36, str(uuid.UUID(int=5)), "../rooms"])
async def test_an_invalid_subscription_id_is_not_found(counter: Counter, text: str) -> None:
    await refused(counter, text, NotFoundError)
    await refused(counter, counter.queue.upper(), NotFoundError)


async def test_a_deleted_subscription_or_room_does_not_exist_any_more(counter: Counter) -> None:
    await counter.publish()
    counter.house.change(counter.room, "UPDATE subscriptions SET status = 'deleted'")
    await refused(counter, counter.queue, NotFoundError)
    counter.house.change(
        counter.room, "UPDATE subscriptions SET status = 'active'; UPDATE rooms SET deleting = true"
    )
    await refused(counter, counter.queue, NotFoundError)


async def test_a_push_subscription_is_not_pulled(counter: Counter) -> None:
    hook = counter.house.subscription(counter.room, "PUSH")
    await counter.publish()
    await refused(counter, hook, ConflictError)


async def test_a_paused_subscription_leases_nothing_and_accepts_acks(counter: Counter) -> None:
    for _ in range(2):
        await counter.publish()
    message = await fetch(counter, max_messages=1)
    counter.house.change(counter.room, "UPDATE subscriptions SET status = 'paused'")
    assert await counter.pull() == []
    assert await counter.pull(wait_ms=50) == []
    assert await counter.settle("extend", message["ack_id"], lease_ms=5000) == ["extended"]
    assert await counter.settle("ack", message["ack_id"]) == ["acked"]
    counter.house.change(counter.room, "UPDATE subscriptions SET status = 'active'")
    assert len(await counter.pull()) == 1


async def test_a_response_has_a_bounded_size_and_leaves_the_rest(counter: Counter) -> None:
    size, count = 250_000, 40
    for number in range(count):
        await counter.publish(f"{number:02}" + "x" * size)
    seen: list[str] = []
    while messages := await counter.pull(max_messages=1000):
        assert sum(len(message["payload"]) for message in messages) < MAX_BYTES + size + 100
        seen += [message["payload"][:2] for message in messages]
    assert seen == [f"{number:02}" for number in range(count)]


@embedded_only
async def test_a_message_visible_late_is_found_before_a_queue_is_called_empty(
    counter: Counter,
) -> None:
    """Leases in a row start where the one before ended; an older message that comes later counts too."""
    for number in range(4):
        await counter.publish(number)
    seen = [(await fetch(counter, max_messages=1))["payload"] for _ in range(2)]
    await counter.publish("late")
    counter.house.run(
        "UPDATE outbox SET due_at = now() - interval '1 h' WHERE id = (SELECT max(id::text)::uuid FROM outbox)"
    )
    while messages := await counter.pull(max_messages=1):
        seen += [message["payload"] for message in messages]
    assert sorted(map(str, seen)) == ["0", "1", "2", "3", "late"]


async def test_concurrent_polls_get_each_message_once(counter: Counter) -> None:
    body = {
        "messages": [{"event_type": "order.created", "payload": number} for number in range(500)]
    }
    await counter.desk.publisher.publish_batch(
        counter.house.principal, counter.room, json.dumps(body).encode(), None
    )
    await counter.carried()
    answers = await asyncio.gather(*(counter.pull(max_messages=7) for _ in range(60)))
    payloads = [message["payload"] for messages in answers for message in messages]
    payloads += [message["payload"] for message in await counter.pull(max_messages=1000)]
    assert sorted(payloads) == list(range(500))
    assert all(len(messages) == 7 for messages in answers)


async def test_concurrent_acks_are_all_answered(counter: Counter) -> None:
    other = counter.house.subscription(counter.room, "PULL")
    for number in range(40):
        await counter.publish(number)
    mine, theirs = (
        await counter.pull(max_messages=40),
        await counter.pull(queue=other, max_messages=40),
    )
    answers = await asyncio.gather(
        *(counter.settle("ack", message["ack_id"]) for message in mine),
        *(counter.settle("ack", message["ack_id"], queue=other) for message in theirs),
    )
    assert answers == [["acked"]] * 80
    assert counter.work() == {"outbox": 0, "held": 0, "leases": 0}
    assert counter.house.count("deliveries WHERE state = 'delivered' AND attempts = 1") == 80


async def test_two_processes_acknowledge_the_same_lease_once(
    database: str, broker: MemoryBroker | None
) -> None:
    async with open_counter(database, broker=broker) as here:
        for number in range(30):
            await here.publish(number)
        ack_ids = [message["ack_id"] for message in await here.pull(max_messages=30)]
        async with open_counter(database, house=here.house, broker=broker) as there:
            answers = await asyncio.gather(
                here.settle("ack", *ack_ids),
                there.settle("ack", *reversed(ack_ids), queue=here.queue),
            )
        assert list(answers) == [["acked"] * 30] * 2
        assert here.house.count("delivery_log WHERE kind = 'pull_acked'") == 30


async def test_a_poll_waits_until_there_is_a_message(counter: Counter) -> None:
    waiting = asyncio.create_task(counter.pull(wait_ms=LONG_MS))
    await counter.a_client_waits()
    await counter.publish("now")
    assert [message["payload"] for message in await waiting] == ["now"]


async def test_a_poll_ends_empty_when_its_time_is_up_and_holds_no_transaction(
    counter: Counter,
) -> None:
    assert await counter.pull(wait_ms=30) == []
    assert counter.puller._waiters.waiting_keys() == []
    await counter.publish("later")
    assert len(await counter.pull()) == 1


async def test_a_message_that_becomes_due_without_a_notification_is_found(counter: Counter) -> None:
    await counter.publish()
    first = await fetch(counter)
    waiting = asyncio.create_task(counter.pull(wait_ms=LONG_MS))
    await counter.settle("nack", first["ack_id"], delay_ms=300)
    (second,) = await waiting
    assert second["delivery_id"] == first["delivery_id"]


async def test_a_poll_is_notified_of_messages_that_another_process_returns(
    database: str, broker: MemoryBroker | None
) -> None:
    async with (
        open_counter(database, broker=broker) as here,
        open_counter(database, house=here.house, broker=broker) as there,
    ):
        await here.publish()
        message = await fetch(here)
        waiting = asyncio.create_task(there.pull(queue=here.queue, wait_ms=LONG_MS))
        await there.a_client_waits()
        assert await here.settle("nack", message["ack_id"]) == ["nacked"]
        (again,) = await waiting
        assert again["attempt"] == 1


async def test_nothing_is_leased_for_a_client_that_disconnected(counter: Counter) -> None:
    left = asyncio.Event()
    assert await counter.pull_bytes(wait_ms=LONG_MS, gone=_leaving(left)) == b'{"messages":[]}'
    assert counter.puller._waiters.waiting_keys() == []
    await counter.publish("for the next one")
    assert (await fetch(counter))["attempt"] == 0


def _leaving(left: asyncio.Event) -> Any:
    async def gone() -> None:
        left.set()

    return gone


async def test_messages_leased_for_a_cancelled_request_are_returned_at_once(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a receive: the client never had them."""
    took, go_on = asyncio.Event(), asyncio.Event()
    take = counter.puller._waiters._batcher._acquire

    async def slowly(wanted: Any) -> Any:
        found = await take(wanted)
        if any(got.messages for got in found):
            took.set()
            await go_on.wait()
        return found

    await counter.publish()
    monkeypatch.setattr(counter.puller._waiters._batcher, "_acquire", slowly)
    pulling = asyncio.create_task(counter.pull())
    await took.wait()
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    go_on.set()
    (message,) = await counter.pull(wait_ms=LONG_MS)
    assert message["attempt"] == 0


async def test_leaving_ends_polls_with_nothing(database: str, broker: MemoryBroker | None) -> None:
    async with open_counter(database, broker=broker) as counter:
        waiting = asyncio.create_task(counter.pull(wait_ms=LONG_MS))
        await counter.a_client_waits()
    assert await waiting == []


async def test_metrics_count_pulled_and_settled_messages(counter: Counter) -> None:
    for _ in range(3):
        await counter.publish()
    one, two, three = await counter.pull()
    await counter.settle("ack", one["ack_id"], one["ack_id"])
    await counter.settle("nack", two["ack_id"])
    await counter.settle("extend", three["ack_id"], lease_ms=1000)
    await counter.settle("ack", two["ack_id"])
    text = counter.metrics.render().decode()
    for line in (
        "rooms_pulls_total 1.0",
        "rooms_pulled_messages_total 3.0",
        'rooms_acks_total{outcome="acked"} 1.0',
        'rooms_acks_total{outcome="nacked"} 1.0',
        'rooms_acks_total{outcome="extended"} 1.0',
        'rooms_acks_total{outcome="late"} 1.0',
    ):
        assert line in text


async def test_a_wake_up_of_a_room_wakes_only_polls_of_its_subscriptions(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large publish names its room instead of every subscription."""
    waiters = counter.puller._waiters
    key = PullSelection(parse_target(counter.house.principal, counter.queue))
    matched: list[bool] = []
    named: list[frozenset[str] | None] = []
    monkeypatch.setattr(waiters, "notify", named.append)
    monkeypatch.setattr(waiters, "notify_matching", lambda matches: matched.append(matches(key)))
    counter.puller.on_notify(frozenset({str(counter.room)}))
    counter.puller.on_notify(frozenset({str(counter.room + 1), counter.queue}))
    assert (matched, named) == ([True, False], [frozenset({counter.queue})])
    counter.puller.on_notify(frozenset())
    assert named[1:] == [None]
