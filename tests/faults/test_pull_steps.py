"""One forced kill between every two steps of a lease, of expiry, of redelivery and of a job."""

from typing import Any

import httpx
import pytest

from tests.support.polling import until
from tests.support.process_group import Crew, Process
from tests.support.room import EVENT_TYPE, Place
from tests.support.webhook_sink import Sink

LONG_POLL_MS = 25_000
SHORT_LEASE_MS = 1000


def call(
    crew: Crew, api: Process, path: str, body: dict[str, Any] | None = None
) -> httpx.Response | None:
    """The answer of another API; None where none came."""
    with crew.at(api) as http:
        try:
            return http.post(f"/v1{path}", json=body)
        except httpx.TransportError:
            return None


def results(answer: httpx.Response) -> list[str]:
    assert answer.status_code in {httpx.codes.OK, httpx.codes.CONFLICT}, answer.text
    return [result["status"] for result in answer.json()["results"]]


def publish_many(crew: Crew, place: Place, count: int) -> None:
    batch = {"messages": [{"event_type": EVENT_TYPE, "payload": number} for number in range(count)]}
    crew.post(f"{place.at}/messages/batch", batch)


def states(crew: Crew, place: Place) -> dict[str, int]:
    return dict(
        crew.rows(
            "SELECT state::text, count(*) FROM deliveries WHERE room_id = %s GROUP BY state",
            place.id,
        )
    )


def test_before_the_commit_of_a_pull(crew: Crew, place: Place) -> None:
    """Leave the message unleased: the next pull gets it, for the first time."""
    queue = place.queue()
    message = place.publish(17)["message_id"]
    dying = crew.start("serve", "before pull")
    assert call(crew, dying, f"/subscriptions/{queue}/pull", {}) is None
    dying.await_death()
    assert place.delivery(message, queue)["state"] == "queued"
    (received,) = place.pull(queue, wait_ms=LONG_POLL_MS)
    assert (received["message_id"], received["attempt"]) == (message, 0)


def test_after_the_commit_of_a_pull_before_its_answer(crew: Crew, place: Place) -> None:
    """Lose the consumer of a lease: the message returns when the lease expires, and nothing else is lost with it."""
    queue = place.queue()
    message = place.publish(17)["message_id"]
    dying = crew.start("serve", "after pull")
    assert call(crew, dying, f"/subscriptions/{queue}/pull", {"lease_ms": SHORT_LEASE_MS}) is None
    dying.await_death()
    assert place.delivery(message, queue)["state"] == "leased"
    crew.start("upkeep")
    (received,) = place.pull(queue, wait_ms=LONG_POLL_MS)
    assert (received["message_id"], received["attempt"]) == (message, 1)
    assert place.steps(message, queue) == ["enqueued", "leased", "lease_ended", "leased"]


@pytest.mark.parametrize(("point", "state"), [("before ack", "leased"), ("after ack", "delivered")])
def test_around_the_commit_of_an_ack(crew: Crew, place: Place, point: str, state: str) -> None:
    """Said again it is acknowledged, either way, and it was delivered once."""
    queue = place.queue()
    message = place.publish(17)["message_id"]
    (received,) = place.pull(queue, wait_ms=LONG_POLL_MS)
    dying = crew.start("serve", point)
    assert (
        call(crew, dying, f"/subscriptions/{queue}/ack", {"ack_ids": [received["ack_id"]]}) is None
    )
    dying.await_death()
    assert place.delivery(message, queue)["state"] == state
    again = place.settle(queue, "ack", received["ack_id"])
    assert (again.status_code, results(again)) == (httpx.codes.OK, ["acked"])
    assert place.steps(message, queue) == ["enqueued", "leased", "pull_acked"]
    assert place.pull(queue) == []


@pytest.mark.parametrize(("point", "said"), [("before nack", "nacked"), ("after nack", "late")])
def test_around_the_commit_of_a_nack(crew: Crew, place: Place, point: str, said: str) -> None:
    """Given back once, however often it is said: the next pull gets it as the second try."""
    queue = place.queue()
    message = place.publish(17)["message_id"]
    (received,) = place.pull(queue, wait_ms=LONG_POLL_MS)
    dying = crew.start("serve", point)
    assert (
        call(crew, dying, f"/subscriptions/{queue}/nack", {"ack_ids": [received["ack_id"]]}) is None
    )
    dying.await_death()
    assert results(place.settle(queue, "nack", received["ack_id"])) == [said]
    (again,) = place.pull(queue, wait_ms=LONG_POLL_MS)
    assert (again["message_id"], again["attempt"]) == (message, 1)
    assert place.steps(message, queue) == ["enqueued", "leased", "nacked", "leased"]


@pytest.mark.parametrize("point", ["before extend", "after extend"])
def test_around_the_commit_of_an_extension(crew: Crew, place: Place, point: str) -> None:
    """Said again it is extended; the lease is one and the same, and its ack counts."""
    queue = place.queue()
    message = place.publish(17)["message_id"]
    (received,) = place.pull(queue, wait_ms=LONG_POLL_MS)
    dying = crew.start("serve", point)
    body = {"ack_ids": [received["ack_id"]], "lease_ms": 60_000}
    assert call(crew, dying, f"/subscriptions/{queue}/extend", body) is None
    dying.await_death()
    assert results(place.settle(queue, "extend", received["ack_id"], lease_ms=60_000)) == [
        "extended"
    ]
    assert results(place.settle(queue, "ack", received["ack_id"])) == ["acked"]
    assert place.delivery(message, queue)["state"] == "delivered"


@pytest.mark.parametrize(
    ("point", "state"), [("before lease end", "leased"), ("after lease end", "queued")]
)
def test_around_the_end_of_a_lease(crew: Crew, place: Place, point: str, state: str) -> None:
    """Leased or queued, never neither: another upkeep, which may begin at once, ends it if that is left to do."""
    queue = place.queue()
    message = place.publish(17)["message_id"]
    (received,) = place.pull(queue, wait_ms=LONG_POLL_MS, lease_ms=SHORT_LEASE_MS)
    until(
        lambda: crew.rows("SELECT FROM leases WHERE room_id = %s AND until <= now()", place.id),
        "the lease to be over",
    )
    crew.start("upkeep", point).await_death()
    assert place.delivery(message, queue)["state"] == state
    assert results(place.settle(queue, "ack", received["ack_id"])) == ["late"]
    crew.start("upkeep")
    (again,) = place.pull(queue, wait_ms=LONG_POLL_MS)
    assert (again["message_id"], again["attempt"]) == (message, 1)
    assert place.steps(message, queue) == ["enqueued", "leased", "lease_ended", "leased"]


@pytest.mark.parametrize(
    ("point", "state"), [("before expiry", "queued"), ("after expiry", "expired")]
)
def test_around_the_commit_of_an_expiry(crew: Crew, place: Place, point: str, state: str) -> None:
    """Expired in the end and recorded once; it is not handed out in between."""
    queue = place.queue()
    message = place.publish(17, ttl_ms=1)["message_id"]
    crew.start("upkeep", point).await_death()
    assert place.delivery(message, queue)["state"] == state
    assert place.pull(queue) == []
    crew.start("upkeep")
    place.await_state(message, queue, "expired")
    assert place.steps(message, queue) == ["enqueued", "expired"]


@pytest.mark.parametrize(
    ("point", "state"), [("before redeliver", "sidelined"), ("after redeliver", "queued")]
)
def test_around_the_commit_of_a_redelivery(
    crew: Crew, place: Place, sink: Sink, point: str, state: str
) -> None:
    """Repeat the nack: it is refused where it is recorded already; the message is sent once more, not twice."""
    hook = place.push(delivery_attempts=0)
    sink.script(hook.path, 500)
    crew.start("worker")
    message = place.publish(17)["message_id"]
    sidelined = place.await_state(message, hook.id, "sidelined")
    crew.post(f"/subscriptions/{hook.id}/pause")
    dying = crew.start("serve", point)
    assert call(crew, dying, f"/deliveries/{sidelined['id']}/redeliver") is None
    dying.await_death()
    again = crew.call("POST", f"/deliveries/{sidelined['id']}/redeliver")
    assert again.status_code == (httpx.codes.OK if state == "sidelined" else httpx.codes.CONFLICT)
    crew.post(f"/subscriptions/{hook.id}/resume")
    place.await_state(message, hook.id, "delivered")
    assert [arrival.attempt for arrival in sink.arrivals(hook.path)] == [0, 0]
    assert place.steps(message, hook.id).count("shoveled") == 1


@pytest.mark.parametrize("point", ["amid cancelling", "before finishing"])
def test_a_deletion_goes_on_where_it_was_left(crew: Crew, place: Place, point: str) -> None:
    """A subscription with more deliveries than one step takes: each is cancelled once, and those of others are left."""
    queue, kept = place.queue(), place.queue("kept")
    for count in (1000, 500):
        publish_many(crew, place, count)
    dying = crew.start("upkeep", point)
    job = crew.call("DELETE", f"/subscriptions/{queue}").json()["job_id"]
    crew.hasten(job)
    dying.await_death()
    cancelled = {"amid cancelling": 1000, "before finishing": 1500}[point]
    assert states(crew, place).get("cancelled", 0) == cancelled
    assert crew.get(f"/jobs/{job}")["state"] in {"queued", "running"}
    crew.start("upkeep")
    until(lambda: crew.get(f"/jobs/{job}")["state"] == "done", "the job")
    assert states(crew, place) == {"cancelled": 1500, "queued": 1500}
    logged = crew.rows(
        "SELECT count(*), count(DISTINCT delivery_id) FROM delivery_log WHERE room_id = %s AND kind = 'cancelled'",
        place.id,
    )
    assert logged == [(1500, 1500)]
    assert crew.rows("SELECT count(*) FROM outbox WHERE room_id = %s", place.id) == [(1500,)]
    assert len(place.pull(kept, most=10)) == 10


def test_the_deletion_of_a_room_goes_on_where_it_was_left(crew: Crew, place: Place) -> None:
    """In the end nothing of the room is left, and the job says so."""
    place.queue()
    publish_many(crew, place, 10)
    dying = crew.start("upkeep", "amid deleting")
    job = crew.call("DELETE", place.at, params={"confirm": place.made["name"]}).json()["job_id"]
    crew.hasten(job)
    dying.await_death()
    assert crew.rows("SELECT deleting FROM rooms WHERE id = %s", place.id) == [(True,)]
    crew.start("upkeep")
    until(lambda: crew.get(f"/jobs/{job}")["state"] == "done", "the job")
    left = crew.rows(
        "SELECT (SELECT count(*) FROM rooms WHERE id = %(room)s), (SELECT count(*) FROM messages WHERE room_id = %(room)s),"
        " (SELECT count(*) FROM deliveries WHERE room_id = %(room)s), (SELECT count(*) FROM delivery_log WHERE room_id = %(room)s)",
        room=place.id,
    )
    assert left == [(0, 0, 0, 0)]
