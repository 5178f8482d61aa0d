"""One forced kill between every two steps of a message's way: what was committed stays, what was not is done again."""

import os
import signal

import httpx
import pytest

from tests.support.crash_points import UNHEARD
from tests.support.polling import until
from tests.support.process_group import Crew, Process
from tests.support.room import EVENT_TYPE, Place
from tests.support.webhook_sink import Reply, Sink

KEY = "order-17"
pytestmark = pytest.mark.parametrize(
    "broker_url", ["embedded", "relayed"], indirect=True, scope="module"
)


def publish_at(crew: Crew, api: Process, place: Place) -> httpx.Response | None:
    """The answer of a publish with an idempotency key at another API; None where none came."""
    with crew.at(api) as http:
        try:
            return http.post(
                f"/v1{place.at}/messages",
                json={"event_type": EVENT_TYPE, "payload": 17},
                headers={"Idempotency-Key": KEY},
            )
        except httpx.TransportError:
            return None


def messages_of(crew: Crew, place: Place) -> list[str]:
    return [
        row[0] for row in crew.rows("SELECT id::text FROM messages WHERE room_id = %s", place.id)
    ]


def attempts_of(sink: Sink, path: str) -> list[int]:
    return [arrival.attempt for arrival in sink.arrivals(path)]


def crash(crew: Crew, place: Place, point: str) -> str:
    """Publish to a worker that dies at a point; the message."""
    dying = crew.start("worker", point)
    message = str(place.publish(17)["message_id"])
    dying.await_death()
    return message


def test_before_the_publish_statement(crew: Crew, place: Place) -> None:
    """No 202 was given and nothing is written; repeated with its key, it is published once."""
    queue = place.queue()
    dying = crew.start("serve", "before publish")
    assert publish_at(crew, dying, place) is None
    dying.await_death()
    assert messages_of(crew, place) == []
    again = place.try_publish(17, key=KEY)
    assert again.status_code == httpx.codes.ACCEPTED
    assert "idempotent-replayed" not in again.headers
    assert messages_of(crew, place) == [again.json()["message_id"]]
    assert place.delivery(again.json()["message_id"], queue)["state"] == "queued"


def test_after_the_publish_commit_before_its_202(crew: Crew, place: Place, sink: Sink) -> None:
    """Keep and deliver the message although its publisher got no answer; repeated with its key it is that very message."""
    hook = place.push()
    dying = crew.start("serve", "after publish")
    assert publish_at(crew, dying, place) is None
    dying.await_death()
    (message,) = messages_of(crew, place)
    again = place.try_publish(17, key=KEY)
    assert again.status_code == httpx.codes.ACCEPTED
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json()["message_id"] == message
    crew.start("worker")
    place.await_state(message, hook.id, "delivered")
    assert attempts_of(sink, hook.path) == [0]


def test_after_the_202_before_the_wake_up(crew: Crew, place: Place, sink: Sink) -> None:
    """Deliver an accepted message by a worker that got no notification: the worker polls."""
    hook = place.push()
    crew.start("worker")
    dying = crew.start("serve", "before wake-up")
    answer = publish_at(crew, dying, place)
    assert answer is not None
    assert answer.status_code == httpx.codes.ACCEPTED
    until(lambda: UNHEARD in dying.reported(), "the wake-up to be held back")
    dying.kill()
    place.await_state(answer.json()["message_id"], hook.id, "delivered")
    assert attempts_of(sink, hook.path) == [0]


@pytest.mark.parametrize("point", ["after claim", "before send"])
def test_after_the_claim_before_the_send(crew: Crew, place: Place, sink: Sink, point: str) -> None:
    """The claim died with its session: another worker has the copy, and the endpoint sees it once."""
    hook = place.push()
    message = crash(crew, place, point)
    assert sink.arrivals(hook.path) == []
    assert place.delivery(message, hook.id)["state"] == "queued"
    crew.start("worker")
    delivered = place.await_state(message, hook.id, "delivered")
    assert attempts_of(sink, hook.path) == [0]
    assert delivered["attempts"] == 1


def test_during_the_send(crew: Crew, place: Place, sink: Sink) -> None:
    """The endpoint has the request and the worker dies: it is sent again, with the same webhook-id and attempt."""
    hook = place.push()
    sink.script(hook.path, 0)
    worker = crew.start("worker")
    message = place.publish(17)["message_id"]
    sink.wait(hook.path)
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.await_death()
    crew.start("worker")
    delivered = place.await_state(message, hook.id, "delivered")
    assert attempts_of(sink, hook.path) == [0, 0]
    assert {arrival.webhook_id for arrival in sink.arrivals(hook.path)} == {delivered["id"]}
    assert place.steps(message, hook.id) == ["enqueued", "attempted", "delivered"]


@pytest.mark.parametrize("point", ["after send", "before delivered"])
def test_after_the_answer_before_its_commit(
    crew: Crew, place: Place, sink: Sink, point: str
) -> None:
    """Lose a success before it is stored: it is sent again with the same webhook-id, and logged once."""
    hook = place.push()
    message = crash(crew, place, point)
    assert attempts_of(sink, hook.path) == [0]
    assert place.delivery(message, hook.id)["state"] == "queued"
    crew.start("worker")
    delivered = place.await_state(message, hook.id, "delivered")
    assert attempts_of(sink, hook.path) == [0, 0]
    assert {arrival.webhook_id for arrival in sink.arrivals(hook.path)} == {delivered["id"]}
    assert place.steps(message, hook.id) == ["enqueued", "attempted", "delivered"]


@pytest.mark.parametrize("point", ["after delivered", "before settle", "after settle"])
def test_after_the_commit_before_it_is_settled(
    crew: Crew, place: Place, sink: Sink, point: str
) -> None:
    """It is delivered and stays so: no other worker sends it again, whatever else it sends."""
    hook = place.push()
    message = crash(crew, place, point)
    assert place.delivery(message, hook.id)["state"] == "delivered"
    crew.start("worker")
    place.await_state(place.publish("marker")["message_id"], hook.id, "delivered")
    assert [arrival.body for arrival in sink.arrivals(hook.path)] == [b"17", b'"marker"']


def test_before_the_commit_of_a_retry(crew: Crew, place: Place, sink: Sink) -> None:
    """Lose a failure before it is stored: the same attempt is made again, and no attempt number is skipped."""
    hook = place.push()
    sink.script(hook.path, 500)
    message = crash(crew, place, "before retry")
    crew.start("worker")
    delivered = place.await_state(message, hook.id, "delivered")
    assert attempts_of(sink, hook.path) == [0, 0]
    assert delivered["attempts"] == 1


def test_after_the_commit_of_a_retry(crew: Crew, place: Place, sink: Sink) -> None:
    """Keep the stored retry: the next attempt is the next one, with its delay, exactly once."""
    hook = place.push()
    sink.script(hook.path, 500)
    message = crash(crew, place, "after retry")
    assert place.delivery(message, hook.id)["attempt"] == 1
    crew.start("worker")
    delivered = place.await_state(message, hook.id, "delivered")
    assert [(arrival.attempt, arrival.delay_ms) for arrival in sink.arrivals(hook.path)] == [
        (0, 0),
        (1, 50),
    ]
    assert place.steps(message, hook.id) == [
        "enqueued",
        "attempted",
        "retry_scheduled",
        "attempted",
        "delivered",
    ]
    assert delivered["attempts"] == 2


@pytest.mark.parametrize(("point", "calls"), [("before sideline", 2), ("after sideline", 1)])
def test_around_the_commit_of_giving_up(
    crew: Crew, place: Place, sink: Sink, point: str, calls: int
) -> None:
    """Sidelined with its reason in the end; sent again only where that was not committed."""
    hook = place.push(delivery_attempts=0)
    sink.script(hook.path, then=500)
    message = crash(crew, place, point)
    crew.start("worker")
    sidelined = place.await_state(message, hook.id, "sidelined")
    assert (sidelined["reason"], sidelined["attempts"]) == ("attempts_exhausted", 1)
    assert attempts_of(sink, hook.path) == [0] * calls


@pytest.mark.parametrize("point", ["before hold", "after hold"])
def test_around_the_commit_of_a_hold(crew: Crew, place: Place, sink: Sink, point: str) -> None:
    """Held in the end, either way, and delivered once when its cause ends."""
    hook = place.push()
    crew.post(f"/subscriptions/{hook.id}/pause")
    message = crash(crew, place, point)
    assert place.delivery(message, hook.id)["state"] == (
        "held" if point == "after hold" else "queued"
    )
    crew.start("worker")
    assert place.await_state(message, hook.id, "held")["reason"] == "paused"
    crew.post(f"/subscriptions/{hook.id}/resume")
    place.await_state(message, hook.id, "delivered")
    assert attempts_of(sink, hook.path) == [0]
    assert place.steps(message, hook.id) == [
        "enqueued",
        "held",
        "released",
        "attempted",
        "delivered",
    ]


@pytest.mark.parametrize("point", ["before release", "after release"])
def test_around_the_release_of_what_was_held(
    crew: Crew, place: Place, sink: Sink, point: str
) -> None:
    """Held or queued, never neither: it is delivered once."""
    hook = place.push()
    crew.post(f"/subscriptions/{hook.id}/pause")
    dying = crew.start("worker", point)
    message = place.publish(17)["message_id"]
    place.await_state(message, hook.id, "held")
    crew.post(f"/subscriptions/{hook.id}/resume")
    dying.await_death()
    assert place.delivery(message, hook.id)["state"] == (
        "queued" if point == "after release" else "held"
    )
    crew.start("worker")
    place.await_state(message, hook.id, "delivered")
    assert attempts_of(sink, hook.path) == [0]
    assert place.steps(message, hook.id) == [
        "enqueued",
        "held",
        "released",
        "attempted",
        "delivered",
    ]


@pytest.mark.parametrize(
    ("point", "status"), [("before disable", "active"), ("after disable", "disabled")]
)
def test_around_the_disabling_of_an_endpoint_that_is_gone(
    crew: Crew, place: Place, sink: Sink, point: str, status: str
) -> None:
    """Neither the 410 nor the message is lost: disabled and sidelined by the next worker, or held until it is resumed."""
    hook = place.push()
    sink.behave(hook.path, lambda _arrival: Reply(status=410))
    message = crash(crew, place, point)
    assert crew.get(f"/subscriptions/{hook.id}")["status"] == status
    crew.start("worker")
    if status == "active":
        assert place.await_state(message, hook.id, "sidelined")["reason"] == "terminal_status"
        # The outcome and the state of the endpoint are written on two connections.
        until(
            lambda: crew.get(f"/subscriptions/{hook.id}")["status"] == "disabled",
            "the endpoint to be disabled",
        )
        return
    # The outcome is committed on another connection at the same time, before the death or not.
    found = place.await_state(message, hook.id, "held", "sidelined")
    sink.script(hook.path)
    crew.post(f"/subscriptions/{hook.id}/resume")
    if found["state"] == "sidelined":
        assert (found["reason"], found["attempts"]) == ("terminal_status", 1)
        crew.post(f"/deliveries/{found['id']}/redeliver")
    else:
        assert found["reason"] == "disabled"
    place.await_state(message, hook.id, "delivered")
