"""PUSH from outside: what is published arrives, signed; what fails comes again by the formula, and ends where it should."""

import base64
import json
from datetime import datetime
from itertools import pairwise

import httpx
from standardwebhooks import Webhook

from tests.support.polling import until
from tests.support.room import EVENT_TYPE, Place
from tests.support.service import EMBEDDED, Service
from tests.support.webhook_sink import Arrival, Reply, Sink


def ids_of(arrivals: list[Arrival]) -> set[str]:
    return {arrival.webhook_id for arrival in arrivals}


def test_a_signed_webhook_arrives_with_exactly_the_published_bytes(
    place: Place, sink: Sink
) -> None:
    hook = place.push()
    payload = '{"b": 1.10,  "a":"ü\\u00fc", "n": 12345678901234567890123, "b": 2}'.encode()
    accepted = place.publish_bytes(payload)
    (arrival,) = sink.wait(hook.path)
    assert arrival.body == payload
    assert Webhook(hook.secret).verify(arrival.body, dict(arrival.headers)) is not None
    delivered = place.await_state(accepted["message_id"], hook.id, "delivered")
    reported = {
        name: value
        for name, value in arrival.headers.items()
        if name.startswith(("rooms-", "webhook-id"))
    }
    assert reported == {
        "webhook-id": delivered["id"],
        "rooms-delivery-attempt": "0",
        "rooms-delivery-delay": "0",
        "rooms-correlation-id": accepted["correlation_id"],
        "rooms-message-id": accepted["message_id"],
        "rooms-event-type": EVENT_TYPE,
        "rooms-event-version": "1",
        "rooms-publisher": place.made["organisation_id"],
    }
    assert arrival.headers["content-type"] == "application/json"
    assert (delivered["attempts"], delivered["last_status"]) == (1, 204)


def test_cloud_events_in_binary_mode_leave_the_body_alone(place: Place, sink: Sink) -> None:
    hook = place.push(cloud_events=True, headers={"X-Team": "billing"})
    accepted = place.publish({"id": 1}, headers={"X-Trace": "t-1"})
    (arrival,) = sink.wait(hook.path)
    assert json.loads(arrival.body) == {"id": 1}
    assert arrival.headers["ce-specversion"] == "1.0"
    assert arrival.headers["ce-id"] == accepted["message_id"]
    assert arrival.headers["ce-type"] == EVENT_TYPE
    assert arrival.headers["ce-source"] == f"/rooms/{place.id}"
    assert arrival.headers["x-team"] == "billing"
    assert arrival.headers["x-trace"] == "t-1"


def test_a_failing_webhook_comes_again_after_delay_times_multiplier_to_the_n(
    service: Service, sink: Sink
) -> None:
    """T(n) = 100 * 3 ^ n: the headers carry it exactly, and nothing comes before its time, nor twice."""
    place = Place.open(
        service, sink, delivery_delay_ms=100, delivery_delay_multiplier=3, delivery_attempts=3
    )
    hook = place.push()
    sink.script(hook.path, 500, 302, 503)
    message = place.publish({"id": 7}, correlation_id="order-7")["message_id"]
    delivered = place.await_state(message, hook.id, "delivered")
    arrivals = sink.arrivals(hook.path)
    assert [(arrival.attempt, arrival.delay_ms) for arrival in arrivals] == [
        (0, 0),
        (1, 100),
        (2, 300),
        (3, 900),
    ]
    assert ids_of(arrivals) == {delivered["id"]}
    assert len({arrival.body for arrival in arrivals}) == 1
    for earlier, later in pairwise(arrivals):
        # Two clocks of one machine may drift a little against each other.
        assert later.at - earlier.at >= later.delay_ms / 1000 - 0.005
    for arrival in arrivals:
        Webhook(hook.secret).verify(arrival.body, dict(arrival.headers))
    assert (delivered["attempt"], delivered["attempts"]) == (3, 4)
    sends = service.rows(
        "SELECT kind, attempt, delay_ms, correlation_id FROM published_messages"
        " WHERE room_id = %s AND subscription_id = %s ORDER BY attempt",
        place.id,
        hook.id,
    )
    assert sends == [
        ("enqueued", 0, None, "order-7"),
        ("retry_scheduled", 1, 100, "order-7"),
        ("retry_scheduled", 2, 300, "order-7"),
        ("retry_scheduled", 3, 900, "order-7"),
    ]
    assert service.rows("SELECT count(*) FROM outbox WHERE room_id = %s", place.id) == [(0,)]


def test_the_journey_is_complete_and_in_order(place: Place, sink: Sink) -> None:
    hook = place.push()
    sink.behave(
        hook.path,
        lambda arrival: Reply(status=201 if arrival.attempt else 500, body=b"out of stock"),
    )
    message = place.publish({"id": 1}, correlation_id="c-1")["message_id"]
    delivery = place.await_state(message, hook.id, "delivered")
    journey = place.journey(message)
    reported = [
        (step["kind"], step["state"], step["attempt"], step["http_status"]) for step in journey
    ]
    assert reported == [
        ("published", None, None, None),
        ("enqueued", "queued", 0, None),
        ("attempted", None, 0, 500),
        ("retry_scheduled", "queued", 1, None),
        ("attempted", None, 1, 201),
        ("delivered", "delivered", 1, None),
    ]
    times = [datetime.fromisoformat(step["ts"]) for step in journey]
    assert times == sorted(times)
    assert {step["correlation_id"] for step in journey} == {"c-1"}
    assert {step["delivery_id"] for step in journey[1:]} == {delivery["id"]}
    failed = journey[2]
    assert failed["error_class"] == "status"
    assert failed["answer"] == "out of stock"
    assert failed["target_host"] == "127.0.0.1"
    assert failed["latency_ms"] > 0
    assert journey[0]["fanout"] == 1


def test_what_exhausts_its_attempts_is_sidelined_with_its_reason_and_can_be_redelivered(
    service: Service, place: Place, sink: Sink
) -> None:
    hook = place.push(delivery_attempts=1, delivery_delay_ms=10)
    sink.script(hook.path, 500, 500)
    message = place.publish()["message_id"]
    sidelined = place.await_state(message, hook.id, "sidelined")
    assert (sidelined["reason"], sidelined["attempts"], sidelined["last_status"]) == (
        "attempts_exhausted",
        2,
        500,
    )
    assert sidelined["last_error"].startswith("status")
    queued = service.post(f"/deliveries/{sidelined['id']}/redeliver")
    assert (queued["generation"], queued["attempt"]) == (1, 0)
    assert queued["state"] in {
        "queued",
        "delivered",
    }  # a worker may have been there before the answer
    place.await_state(message, hook.id, "delivered")
    arrivals = sink.arrivals(hook.path)
    assert [(arrival.attempt, arrival.delay_ms) for arrival in arrivals] == [
        (0, 0),
        (1, 10),
        (0, 0),
    ]
    assert ids_of(arrivals) == {sidelined["id"]}
    assert place.steps(message, hook.id)[-4:] == ["sidelined", "shoveled", "attempted", "delivered"]
    again = service.call("POST", f"/deliveries/{sidelined['id']}/redeliver")
    assert again.status_code == httpx.codes.CONFLICT


def test_terminal_and_ignorable_statuses_end_at_once(place: Place, sink: Sink) -> None:
    terminal = place.push("terminal", terminal_statuses=[400])
    ignorable = place.push("ignorable", ignorable_statuses=[404])
    sink.script(terminal.path, 400)
    sink.script(ignorable.path, 404)
    message = place.publish()["message_id"]
    assert place.await_state(message, terminal.id, "sidelined")["reason"] == "terminal_status"
    assert place.await_state(message, ignorable.id, "dropped")["reason"] == "ignorable_status"
    assert len(sink.arrivals(terminal.path)) == len(sink.arrivals(ignorable.path)) == 1


def test_retry_after_is_honoured(place: Place, sink: Sink) -> None:
    hook = place.push()
    sink.behave(
        hook.path,
        lambda arrival: (
            Reply() if arrival.attempt else Reply(status=429, headers={"Retry-After": "1"})
        ),
    )
    place.publish()
    first, second = sink.wait(hook.path, 2)
    assert second.delay_ms == 1000
    assert second.at - first.at >= 0.995


def test_a_webhook_that_hangs_delays_no_other(service: Service, sink: Sink) -> None:
    place = Place.open(service, sink, delivery_attempts=0)
    stuck = place.push("stuck", timeout_ms=1000)
    healthy = place.push("healthy")
    sink.script(stuck.path, then=0)
    messages = [place.publish({"n": number})["message_id"] for number in range(5)]
    sink.wait(healthy.path, 5)
    stuck_one = place.await_state(messages[0], stuck.id, "sidelined")
    assert stuck_one["last_status"] is None
    assert stuck_one["last_error"].startswith("timeout")


def test_what_is_published_while_paused_is_held_and_released(
    service: Service, place: Place, sink: Sink
) -> None:
    hook = place.push()
    assert service.post(f"/subscriptions/{hook.id}/pause")["status"] == "paused"
    messages = [place.publish({"n": number})["message_id"] for number in range(3)]
    for message in messages:
        assert place.await_state(message, hook.id, "held")["reason"] == "paused"
    assert sink.arrivals(hook.path) == []
    assert service.post(f"/subscriptions/{hook.id}/resume")["status"] == "active"
    arrivals = sink.wait(hook.path, 3)
    assert {arrival.headers["rooms-message-id"] for arrival in arrivals} == set(messages)
    place.await_state(messages[0], hook.id, "delivered")
    assert place.steps(messages[0], hook.id) == [
        "enqueued",
        "held",
        "released",
        "attempted",
        "delivered",
    ]
    until(
        lambda: (
            service.metric("rooms_released_total", 'reason="paused"', 'way="room"') >= len(messages)
        ),
        "its metric",
    )


def test_a_410_disables_the_endpoint_and_resume_lets_the_rest_go(
    service: Service, place: Place, sink: Sink
) -> None:
    hook = place.push()
    sink.script(hook.path, 410)
    gone = place.publish({"n": 0})["message_id"]
    sidelined = place.await_state(gone, hook.id, "sidelined")
    assert (sidelined["reason"], sidelined["last_status"]) == ("terminal_status", 410)
    until(
        lambda: service.get(f"/subscriptions/{hook.id}")["status"] == "disabled",
        "the endpoint to be disabled",
    )
    assert "410" in service.get(f"/subscriptions/{hook.id}")["status_reason"]
    assert (
        service.call("POST", f"/subscriptions/{hook.id}/pause").status_code == httpx.codes.CONFLICT
    )
    waiting = place.publish({"n": 1})["message_id"]
    assert place.await_state(waiting, hook.id, "held")["reason"] == "disabled"
    assert len(sink.arrivals(hook.path)) == 1
    service.post(f"/subscriptions/{hook.id}/resume")
    place.await_state(waiting, hook.id, "delivered")
    assert place.delivery(gone, hook.id)["state"] == "sidelined"


def test_during_an_overlap_both_secrets_sign(service: Service, place: Place, sink: Sink) -> None:
    hook = place.push()
    rotated = service.post(f"/subscriptions/{hook.id}/rotate-secret", {"overlap_s": 3600})
    assert rotated["previous_secret_until"] is not None
    place.publish({"n": 1})
    (both,) = sink.wait(hook.path)
    assert len(both.headers["webhook-signature"].split()) == 2
    for secret in (hook.secret, rotated["secret"]):
        Webhook(secret).verify(both.body, dict(both.headers))
    last = service.post(f"/subscriptions/{hook.id}/rotate-secret", {"overlap_s": 0})
    place.publish({"n": 2})
    alone = sink.wait(hook.path, 2)[1]
    assert len(alone.headers["webhook-signature"].split()) == 1
    Webhook(last["secret"]).verify(alone.body, dict(alone.headers))


def test_a_secret_is_of_the_public_form(place: Place) -> None:
    secret = place.push().secret
    assert secret.startswith("whsec_")
    assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32


def test_a_ping_shows_the_answer_and_is_no_delivery(
    service: Service, place: Place, sink: Sink
) -> None:
    hook = place.push()
    sink.behave(hook.path, lambda _arrival: Reply(status=418, body=b"short and stout"))
    answer = service.post(f"/subscriptions/{hook.id}/test")
    assert (answer["status"], answer["error"], answer["body"]) == (418, "status", "short and stout")
    (arrival,) = sink.arrivals(hook.path)
    Webhook(hook.secret).verify(arrival.body, dict(arrival.headers))
    assert arrival.headers["rooms-event-type"] == "rooms.ping"
    assert service.get(f"/subscriptions/{hook.id}/deliveries")["items"] == []
    queue = place.queue()
    assert service.call("POST", f"/subscriptions/{queue}/test").status_code == httpx.codes.CONFLICT


def test_a_changed_url_holds_for_the_next_attempt(
    service: Service, place: Place, sink: Sink
) -> None:
    # It fails on and on, so that the change comes between two attempts however long it takes.
    hook = place.push(delivery_delay_ms=100, delivery_delay_multiplier=1, delivery_attempts=1000)
    sink.script(hook.path, then=500)
    message = place.publish()["message_id"]
    sink.wait(hook.path)
    moved = f"{hook.path}-moved"
    answer = service.call("PATCH", f"/subscriptions/{hook.id}", {"push_url": sink.url(moved)})
    assert answer.status_code == httpx.codes.OK, answer.text
    place.await_state(message, hook.id, "delivered")
    assert len(sink.arrivals(moved)) == 1
    assert len(sink.arrivals(hook.path)) == sink.arrivals(moved)[0].attempt


def test_the_metrics_show_what_happened(service: Service, place: Place, sink: Sink) -> None:
    hook = place.push()
    sink.script(hook.path, 500)
    accepted = service.metric("rooms_publishes_total", 'outcome="accepted"')
    failed = service.metric("rooms_attempts_total", 'status="5xx"')
    delivered = service.metric("rooms_attempts_total", 'outcome="delivered"')
    message = place.publish()["message_id"]
    place.await_state(message, hook.id, "delivered")
    until(
        lambda: service.metric("rooms_attempts_total", 'outcome="delivered"') > delivered,
        "the worker's counters",
    )
    assert service.metric("rooms_publishes_total", 'outcome="accepted"') > accepted
    assert service.metric("rooms_attempts_total", 'status="5xx"') > failed
    assert service.metric("rooms_attempt_latency_seconds_count") > 0
    assert service.metric("rooms_publish_latency_seconds_count") > 0
    assert service.metric("rooms_database_up") == 1


def test_readiness_names_the_parts(shape: str, service: Service) -> None:
    parts = [
        "database",
        "writes",
        "worker",
        "upkeep",
        "leader",
        *([] if shape == EMBEDDED else ["broker", "relay"]),
    ]
    expected = {
        "status": "ready",
        "parts": dict.fromkeys(parts, "up"),
        "degraded": [],
        "leader_absent_seconds": 0,
    }

    def ready() -> bool:
        answer = service.http.get("/health/ready", headers={"authorization": ""})
        return answer.status_code == httpx.codes.OK and answer.json() == expected

    until(
        ready, "all parts to be up"
    )  # each has two seconds to answer, which one may miss on a busy machine
    assert service.http.get("/health/live").json() == {"status": "live"}
