"""Rooms, types, subscriptions and publishing from outside."""

from typing import Any

import httpx

from rooms.domain.work_location import WorkLocation as Kind
from tests.support.polling import until
from tests.support.room import EVENT_TYPE, POLICY, Place
from tests.support.service import EMBEDDED, Service
from tests.support.webhook_sink import Sink

UNPROCESSABLE = httpx.codes.UNPROCESSABLE_ENTITY


def fields_of(answer: httpx.Response) -> set[str]:
    """The fields that a 422 names."""
    assert answer.status_code == UNPROCESSABLE, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    return {problem["field"] for problem in answer.json()["errors"]}


def await_job(service: Service, accepted: httpx.Response) -> dict[str, Any]:
    assert accepted.status_code == httpx.codes.ACCEPTED, accepted.text
    path = accepted.headers["location"].removeprefix("/v1")
    service.hasten(accepted.json()["job_id"])
    until(lambda: service.get(path)["state"] in {"done", "failed"}, "the job")
    job: dict[str, Any] = service.get(path)
    assert job["state"] == "done", job
    return job


def test_a_room_has_a_name_a_lifetime_and_a_retry_policy(
    service: Service, place: Place, sink: Sink
) -> None:
    read = service.get(place.at)
    assert {name: read[name] for name in POLICY} == POLICY
    assert read["message_expiration_ms"] is None
    taken = service.call("POST", "/rooms", {"name": read["name"], **POLICY})
    assert taken.status_code == httpx.codes.CONFLICT
    for name in ("", "with space", "slash/ed", "ümlaut", "new\nline"):
        assert fields_of(service.call("POST", "/rooms", {"name": name, **POLICY})) == {"name"}
    for field, value in (
        ("delivery_delay_ms", -1),
        ("delivery_attempts", -1),
        ("message_expiration_ms", -1),
    ):
        assert fields_of(service.call("POST", "/rooms", {"name": "a", **POLICY, field: value})) == {
            field
        }
    changed = service.call("PATCH", place.at, {"delivery_attempts": 0, "message_expiration_ms": 0})
    assert (changed.json()["delivery_attempts"], changed.json()["message_expiration_ms"]) == (0, 0)
    hook = place.push()
    sink.script(hook.path, 500)
    message = place.publish()["message_id"]
    assert place.await_state(message, hook.id, "sidelined")["attempts"] == 1


def test_push_needs_a_url_and_pull_must_not_have_one(service: Service, place: Place) -> None:
    subscriptions = f"{place.at}/subscriptions"
    assert fields_of(service.call("POST", subscriptions, {"name": "a", "type": "PUSH"})) == {
        "push_url"
    }
    pull = {"name": "a", "type": "PULL", "push_url": "http://127.0.0.1/"}
    assert fields_of(service.call("POST", subscriptions, pull)) == {"push_url"}
    assert (
        service.call("POST", subscriptions, {"name": "a", "type": "OTHER"}).status_code
        == UNPROCESSABLE
    )
    made = service.post(subscriptions, {"name": "a", "type": "PULL"})
    assert made["secret"] is None


def test_each_override_is_independent_and_the_lifetime_is_only_shortened(
    service: Service, sink: Sink
) -> None:
    place = Place.open(
        service,
        sink,
        delivery_delay_ms=20,
        delivery_delay_multiplier=2,
        delivery_attempts=2,
        message_expiration_ms=3_600_000,
    )
    hooks = {
        place.push("room"): [0, 20, 40],
        place.push("delay", delivery_delay_ms=50): [0, 50, 100],
        place.push("multiplier", delivery_delay_multiplier=5): [0, 20, 100],
        place.push("attempts", delivery_attempts=1): [0, 20],
        place.push("cap", delivery_max_delay_ms=30): [0, 20, 30],
        place.push("lifetime", message_expiration_ms=1_800_000): [0, 20, 40],
    }
    for hook in hooks:
        sink.script(hook.path, then=500)
    message = place.publish()["message_id"]
    for hook, delays in hooks.items():
        place.await_state(message, hook.id, "sidelined")
        assert [arrival.delay_ms for arrival in sink.arrivals(hook.path)] == delays, hook.path
    body = {"name": "x", "type": "PULL", "message_expiration_ms": 3_600_001}
    assert fields_of(service.call("POST", f"{place.at}/subscriptions", body)) == {
        "message_expiration_ms"
    }


def test_destinations_name_room_and_subscription_and_all_push_waits_in_one_queue(
    shape: str, service: Service, place: Place, sink: Sink
) -> None:
    hooks = [place.push(name, delivery_delay_ms=50_000) for name in ("one", "two")]
    queue = place.queue()
    for hook in hooks:
        sink.script(hook.path, 500)
    accepted = place.publish()
    expected = {
        f"room-{place.id}::subscription-{identity}"
        for identity in (hooks[0].id, hooks[1].id, queue)
    }
    assert set(accepted["destinations"]) == expected
    read = {
        service.get(f"/subscriptions/{identity}")["destination"]
        for identity in (hooks[0].id, hooks[1].id, queue)
    }
    assert read == expected
    for hook in hooks:
        until(
            lambda hook=hook: place.delivery(accepted["message_id"], hook.id)["attempt"] == 1,  # type: ignore[misc]
            "the failure",
        )
    push, pull = (
        (Kind.PUSH_LOCAL, Kind.PULL_LOCAL)
        if shape == EMBEDDED
        else (Kind.PUSH_AT_BROKER, Kind.PULL_AT_BROKER)
    )
    statement = "SELECT kind, count(*) FROM outbox WHERE room_id = %s GROUP BY kind ORDER BY kind"
    until(
        lambda: service.rows(statement, place.id) == [(push, 2), (pull, 1)],
        "the work to wait in its queues",
    )


def test_a_publish_goes_where_subscriptions_types_and_versions_say(
    service: Service, sink: Sink
) -> None:
    place = Place.open(service, sink, event_types=("order.created", "order.paid"))
    service.post(f"{place.at}/event-types/order.created/versions", {"schema": {"type": "object"}})
    everything = place.queue("everything")
    created = place.queue("created", event_types=[{"name": "order.created"}])
    second = place.queue("second", event_types=[{"name": "order.created", "versions": [2]}])
    paid = place.push("paid", event_types=[{"name": "order.paid"}]).id

    def reached(**fields: Any) -> set[str]:
        return {
            one.rpartition("subscription-")[2]
            for one in place.publish({}, **fields)["destinations"]
        }

    assert reached(version=1) == {everything, created}
    assert reached() == {everything, created, second}
    assert reached(event_type="order.paid") == {everything, paid}
    chosen = [f"room-{place.id}::subscription-{identity}" for identity in (second, everything)]
    assert reached(destinations=chosen) == {everything, second}
    stranger = place.try_publish({}, destinations=[chosen[0]], version=1)
    assert fields_of(stranger) == {"destinations[0]"}
    assert fields_of(place.try_publish({}, event_type="order.lost")) == {"event_type"}
    assert fields_of(place.try_publish({}, version=3)) == {"version"}
    got = [(message["event_type"], message["version"]) for message in place.pull_all(everything, 4)]
    assert sorted(got) == [
        ("order.created", 1),
        ("order.created", 2),
        ("order.created", 2),
        ("order.paid", 1),
    ]


def test_from_the_201_of_a_subscription_on_every_publish_reaches_it(place: Place) -> None:
    place.publish()
    for number in range(10):
        queue = place.queue(f"queue-{number}")
        accepted = place.publish(number)
        assert len(accepted["destinations"]) == number + 1
        assert [message["payload"] for message in place.pull(queue, wait_ms=25_000)] == [number]


def test_versions_of_an_event_type_are_checked_kept_and_never_rewritten_once_used(
    service: Service, place: Place
) -> None:
    types = f"{place.at}/event-types"
    number = {
        "type": "object",
        "properties": {"amount": {"type": "number"}},
        "required": ["amount"],
    }
    text = {"type": "object", "properties": {"amount": {"type": "string"}}}
    service.post(types, {"name": "paid", "schema": number})
    added = service.post(f"{types}/paid/versions", {"schema": text})
    assert added["version"] == 2
    assert fields_of(place.try_publish({"amount": 1}, event_type="paid")) == {"payload.amount"}
    assert fields_of(place.try_publish({}, event_type="paid", version=1)) == {"payload"}
    place.publish({"amount": 1}, event_type="paid", version=1)
    rewritten = service.call("PUT", f"{types}/paid/versions/1", {"schema": text})
    assert rewritten.status_code == httpx.codes.CONFLICT
    assert (
        service.call("PUT", f"{types}/paid/versions/2", {"schema": True}).status_code
        == httpx.codes.OK
    )
    assert service.call("DELETE", f"{types}/paid/versions/1").status_code == httpx.codes.CONFLICT
    assert service.call("DELETE", f"{types}/paid/versions/2").status_code == httpx.codes.NO_CONTENT
    assert (
        service.call("DELETE", f"{types}/{EVENT_TYPE}/versions/1").status_code
        == httpx.codes.CONFLICT
    )
    assert service.get(f"{types}/paid")["versions"] == [1]
    assert (
        service.call("POST", types, {"name": "bad", "schema": {"type": "nonsense"}}).status_code
        == UNPROCESSABLE
    )


def test_an_idempotency_key_publishes_once(service: Service, place: Place) -> None:
    queue = place.queue()
    first = place.try_publish({"id": 1}, key="order-1")
    again = place.try_publish({"id": 1}, key="order-1")
    assert (first.status_code, again.status_code) == (httpx.codes.ACCEPTED, httpx.codes.ACCEPTED)
    assert again.json() == first.json()
    assert (first.headers.get("idempotent-replayed"), again.headers["idempotent-replayed"]) == (
        None,
        "true",
    )
    assert place.try_publish({"id": 2}, key="order-1").status_code == httpx.codes.CONFLICT
    assert len(place.pull(queue, wait_ms=25_000)) == 1
    elsewhere = Place.open(service, place.sink)
    assert elsewhere.try_publish({"id": 2}, key="order-1").status_code == httpx.codes.ACCEPTED


def test_a_batch_is_published_whole_or_not_at_all(service: Service, place: Place) -> None:
    queue = place.queue()
    batch = f"{place.at}/messages/batch"
    good = {"event_type": EVENT_TYPE, "payload": 1}
    wrong = service.call(
        "POST",
        batch,
        {"messages": [good, {**good, "priority": 10}, {"event_type": "no", "payload": 1}]},
    )
    assert fields_of(wrong) == {"messages[1].priority"}
    unknown = service.call(
        "POST", batch, {"messages": [good, good, {"event_type": "no", "payload": 1}]}
    )
    assert fields_of(unknown) == {"messages[2].event_type"}
    assert place.pull(queue) == []
    accepted = service.post(
        batch, {"messages": [{**good, "payload": number} for number in range(3)]}
    )
    assert len(accepted["messages"]) == 3
    pulled = {message["message_id"]: message["payload"] for message in place.pull_all(queue, 3)}
    assert pulled == {one["message_id"]: number for number, one in enumerate(accepted["messages"])}


def test_a_payload_beyond_the_limit_is_refused(place: Place) -> None:
    assert place.try_publish("x" * (256 * 1024 - 2)).status_code == httpx.codes.ACCEPTED
    assert place.try_publish("x" * (256 * 1024)).status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE


def test_a_deleted_subscription_gets_nothing_more(
    service: Service, place: Place, sink: Sink
) -> None:
    hook = place.push(delivery_delay_ms=60_000)
    queue, kept = place.queue(), place.queue("kept")
    sink.script(hook.path, 500)
    message = place.publish()["message_id"]
    until(lambda: place.delivery(message, hook.id)["attempt"] == 1, "the failure")
    accepted = {
        identity: service.call("DELETE", f"/subscriptions/{identity}")
        for identity in (hook.id, queue)
    }
    for identity, job in accepted.items():
        assert (
            service.call("GET", f"/subscriptions/{identity}").status_code == httpx.codes.NOT_FOUND
        )
        await_job(service, job)
        cancelled = place.await_state(message, identity, "cancelled")
        assert cancelled["reason"] == "subscription_deleted"
        assert place.steps(message, identity)[-1] == "cancelled"
    assert place.publish()["destinations"] == [f"room-{place.id}::subscription-{kept}"]
    assert len(place.pull_all(kept, 2)) == 2


def test_a_room_is_deleted_with_everything_in_it_once_its_name_is_repeated(
    service: Service, place: Place
) -> None:
    queue = place.queue()
    message = place.publish()["message_id"]
    assert fields_of(service.call("DELETE", place.at)) == {"confirm"}
    accepted = service.call("DELETE", place.at, params={"confirm": place.made["name"]})
    gone = [place.at, f"/subscriptions/{queue}", f"/messages/{message}"]
    assert {service.call("GET", path).status_code for path in gone} == {httpx.codes.NOT_FOUND}
    assert place.try_publish().status_code == httpx.codes.NOT_FOUND
    await_job(service, accepted)
    for table in ("rooms", "subscriptions", "messages", "deliveries", "outbox"):
        column = "id" if table == "rooms" else "room_id"
        assert service.rows(f"SELECT count(*) FROM {table} WHERE {column} = %s", place.id) == [
            (0,)
        ], table
    service.post("/rooms", {"name": place.made["name"], **POLICY})
