"""PULL from outside: leases, and what ends them."""

import threading
from datetime import datetime

import httpx

from tests.support.polling import until
from tests.support.room import EVENT_TYPE, Place
from tests.support.service import EMBEDDED, Service
from tests.support.webhook_sink import Sink

LONG_POLL_MS = 25_000
SOON_MS = 500
NEVER_MS = 3_600_000
"""Longer than any test."""
LEFT_MS = "SELECT extract(epoch FROM until - now()) * 1000 FROM leases WHERE room_id = %s"


def at(step: dict[str, str]) -> datetime:
    return datetime.fromisoformat(step["ts"])


def statuses(answer: httpx.Response) -> dict[str, str]:
    return {result["ack_id"]: result["status"] for result in answer.json()["results"]}


def test_a_message_is_pulled_and_acknowledged(place: Place) -> None:
    queue = place.queue()
    accepted = place.publish({"id": 17}, correlation_id="c-17")
    (message,) = place.pull(queue, wait_ms=LONG_POLL_MS)
    delivery = place.delivery(accepted["message_id"], queue)
    assert delivery["state"] == "leased"
    times = {"ack_id", "published_at", "lease_until"}
    assert {name: message[name] for name in message if name not in times} == {
        "delivery_id": delivery["id"],
        "message_id": accepted["message_id"],
        "attempt": 0,
        "event_type": EVENT_TYPE,
        "version": 1,
        "correlation_id": "c-17",
        "priority": 4,
        "delay_ms": 0,
        "publisher": {"organisation_id": place.made["organisation_id"]},
        "payload": {"id": 17},
    }
    assert datetime.fromisoformat(message["published_at"]).tzinfo is not None
    assert place.pull(queue) == []
    answer = place.settle(queue, "ack", message["ack_id"])
    assert answer.status_code == httpx.codes.OK
    assert statuses(answer) == {message["ack_id"]: "acked"}
    assert place.delivery(accepted["message_id"], queue)["state"] == "delivered"
    assert place.steps(accepted["message_id"], queue) == ["enqueued", "leased", "pull_acked"]


def test_a_batch_is_pulled_in_order_and_settled_one_by_one(place: Place, shape: str) -> None:
    """In full the relay hands several batches over side by side: the urgent one comes first, the others as they come."""
    queue = place.queue()
    for number in range(5):
        place.publish(number)
    place.publish("urgent", priority=9)
    to_send = "SELECT count(*) FROM outbox WHERE room_id = %s AND kind = 3"
    until(lambda: place.service.rows(to_send, place.id) == [(0,)], "all six to be there")
    messages = place.pull_all(queue, 6)
    payloads = [message["payload"] for message in messages]
    assert payloads[0] == "urgent"
    assert (payloads[1:] if shape == EMBEDDED else sorted(payloads[1:])) == [0, 1, 2, 3, 4]
    done, back = messages[:4], messages[4:]
    place.settle(queue, "ack", *(message["ack_id"] for message in done))
    answer = place.settle(queue, "nack", *(message["ack_id"] for message in back))
    assert set(statuses(answer).values()) == {"nacked"}
    again = place.pull_all(queue, 2)
    assert sorted(message["payload"] for message in again) == sorted(payloads[4:])
    assert {message["attempt"] for message in again} == {1}


def test_a_nacked_message_is_invisible_until_it_is_due(service: Service, place: Place) -> None:
    """Until then no pull gets it, and a key that may only subscribe does not even see that it is there."""
    queue = place.queue()
    messages = {place.publish(payload)["message_id"]: payload for payload in ("late", "later")}
    subscriber = {
        "authorization": f"Bearer {service.post('/keys', {'name': 'reader', 'scopes': ['subscribe']})['key']}"
    }
    leased = {messages[one["message_id"]]: one for one in place.pull_all(queue, 2)}
    for payload, delay_ms in (("late", SOON_MS), ("later", NEVER_MS)):
        answer = place.settle(queue, "nack", leased[payload]["ack_id"], delay_ms=delay_ms)
        assert answer.status_code == httpx.codes.OK, answer.text
    (again,) = place.pull(queue, wait_ms=LONG_POLL_MS)
    assert again["delivery_id"] == leased["late"]["delivery_id"]
    assert place.pull(queue) == []
    seen = {
        name: service.call("GET", f"/deliveries/{one['delivery_id']}", headers=subscriber)
        for name, one in leased.items()
    }
    assert (seen["late"].status_code, seen["later"].status_code) == (
        httpx.codes.OK,
        httpx.codes.NOT_FOUND,
    )
    listed = service.call("GET", f"/subscriptions/{queue}/deliveries", headers=subscriber).json()[
        "items"
    ]
    assert [delivery["id"] for delivery in listed] == [again["delivery_id"]]
    late, later = messages
    assert place.delivery(later, queue)["next_attempt_at"] is not None
    nacked, leased_again = place.journey(late)[-2:]
    assert (nacked["kind"], nacked["delay_ms"], leased_again["kind"]) == (
        "nacked",
        SOON_MS,
        "leased",
    )
    assert (at(leased_again) - at(nacked)).total_seconds() >= SOON_MS / 1000


def test_a_lease_that_runs_out_makes_the_message_available_and_its_ack_late(place: Place) -> None:
    queue = place.queue()
    message = place.publish("again")["message_id"]
    (first,) = place.pull(queue, wait_ms=LONG_POLL_MS, lease_ms=1000)
    (second,) = place.pull(queue, wait_ms=LONG_POLL_MS)
    assert second["delivery_id"] == first["delivery_id"]
    assert (first["attempt"], second["attempt"]) == (0, 1)
    assert second["ack_id"] != first["ack_id"]
    steps = [step for step in place.journey(message) if step["subscription_id"]]
    assert [step["kind"] for step in steps] == ["enqueued", "leased", "lease_ended", "leased"]
    # It is available within a second, or whenever this machine has time; the poll's length bounds it.
    assert (at(steps[2]) - at(steps[1])).total_seconds() >= 1.0
    late = place.settle(queue, "ack", first["ack_id"])
    assert late.status_code == httpx.codes.CONFLICT
    assert place.delivery(message, queue)["state"] == "leased"
    mixed = place.settle(queue, "ack", first["ack_id"], second["ack_id"])
    assert mixed.status_code == httpx.codes.OK
    assert statuses(mixed) == {first["ack_id"]: "late", second["ack_id"]: "acked"}
    assert place.delivery(message, queue)["state"] == "delivered"


def test_a_lease_can_be_extended_and_shortened(place: Place) -> None:
    """It ends so long after the call, and no more so long after the pull."""
    queue = place.queue()
    message = place.publish("slow")["message_id"]
    (leased,) = place.pull(queue, wait_ms=LONG_POLL_MS, lease_ms=NEVER_MS)
    longer = place.settle(queue, "extend", leased["ack_id"], lease_ms=3 * NEVER_MS)
    assert statuses(longer) == {leased["ack_id"]: "extended"}
    assert place.service.rows(LEFT_MS, place.id)[0][0] > NEVER_MS
    shorter = place.settle(queue, "extend", leased["ack_id"], lease_ms=1000)
    assert statuses(shorter) == {leased["ack_id"]: "extended"}
    (again,) = place.pull(queue, wait_ms=LONG_POLL_MS)
    assert (again["message_id"], again["attempt"]) == (message, 1)
    assert place.settle(queue, "ack", leased["ack_id"]).status_code == httpx.codes.CONFLICT
    assert place.settle(queue, "ack", again["ack_id"]).status_code == httpx.codes.OK
    assert place.delivery(message, queue)["state"] == "delivered"


def test_what_was_received_too_often_is_sidelined(service: Service, place: Place) -> None:
    queue = place.queue(max_receives=2)
    message = place.publish("poison")["message_id"]
    for _ in range(2):
        (received,) = place.pull(queue, wait_ms=LONG_POLL_MS)
        place.settle(queue, "nack", received["ack_id"])
    sidelined = place.await_state(message, queue, "sidelined")
    assert sidelined["reason"] == "nacked"
    assert place.pull(queue) == []
    service.post(f"/deliveries/{sidelined['id']}/redeliver")
    (received,) = place.pull(queue, wait_ms=LONG_POLL_MS)
    assert (received["delivery_id"], received["attempt"]) == (sidelined["id"], 0)


def test_a_long_poll_is_woken_by_a_publish(place: Place) -> None:
    queue = place.queue()
    got: list[object] = []
    waiting = threading.Thread(target=lambda: got.extend(place.pull(queue, wait_ms=LONG_POLL_MS)))
    waiting.start()
    message = place.publish("news")["message_id"]
    waiting.join(LONG_POLL_MS / 1000)
    assert not waiting.is_alive()
    assert [one["message_id"] for one in got if isinstance(one, dict)] == [message]


def test_a_paused_queue_hands_out_nothing_until_it_is_resumed(
    service: Service, place: Place
) -> None:
    queue = place.queue()
    service.post(f"/subscriptions/{queue}/pause")
    message = place.publish("patience")["message_id"]
    assert place.pull(queue) == []
    service.post(f"/subscriptions/{queue}/resume")
    (received,) = place.pull(queue, wait_ms=LONG_POLL_MS)
    assert received["message_id"] == message


def test_an_unpulled_message_expires_and_is_recorded(service: Service, sink: Sink) -> None:
    place = Place.open(service, sink, message_expiration_ms=400)
    queue = place.queue()
    accepted = place.publish("stale")
    message = service.get(f"/messages/{accepted['message_id']}")
    life_s = datetime.fromisoformat(message["expires_at"]) - datetime.fromisoformat(
        message["published_at"]
    )
    assert life_s.total_seconds() == 0.4
    place.await_state(accepted["message_id"], queue, "expired")
    assert place.pull(queue) == []
    assert place.steps(accepted["message_id"], queue) == ["enqueued", "expired"]


def test_a_retry_that_would_come_too_late_is_not_sent(service: Service, sink: Sink) -> None:
    """`ttl_ms` shortens the room's lifetime and never lengthens it; null and 0 mean never."""
    place = Place.open(
        service, sink, message_expiration_ms=2 * NEVER_MS, delivery_delay_ms=NEVER_MS
    )
    hook = place.push()
    sink.script(hook.path, then=500)
    short = place.publish("short", ttl_ms=NEVER_MS // 2)["message_id"]
    expired = place.await_state(short, hook.id, "expired")
    assert expired["reason"] == "too_late"
    assert len(sink.arrivals(hook.path)) == 1
    assert place.steps(short, hook.id) == ["enqueued", "attempted", "expired"]
    long = service.get(f"/messages/{place.publish('long', ttl_ms=3 * NEVER_MS)['message_id']}")
    life = datetime.fromisoformat(long["expires_at"]) - datetime.fromisoformat(long["published_at"])
    assert life.total_seconds() == 2 * NEVER_MS / 1000
    for never in (None, 0):
        eternal = Place.open(service, sink, message_expiration_ms=never)
        assert service.get(f"/messages/{eternal.publish()['message_id']}")["expires_at"] is None
