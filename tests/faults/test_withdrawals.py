"""One forced kill around every step of a withdrawal and of a move: it was made or it was not, and either way it holds.

Oracle: a cancelled message is never attempted, from no copy; a rescheduled one is delivered once, at its new time; and
a publisher that got no answer and asks again learns which of the two happened.
"""

from typing import Any

import httpx
import pytest

from tests.support.process_group import Crew, Process
from tests.support.room import Hook, Place
from tests.support.webhook_sink import Sink

HOUR_MS = 3_600_000


def in_shapes(*shapes: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("broker_url", shapes, indirect=True, scope="module")


def ask(
    crew: Crew, api: Process, method: str, message: str, body: dict[str, Any] | None = None
) -> None:
    """Ask an API that dies of it: there is no answer."""
    with crew.at(api) as http, pytest.raises(httpx.TransportError):
        http.request(method, f"/v1/messages/{message}", json=body)
    api.await_death()


def withdraw(crew: Crew, message: str) -> httpx.Response:
    return crew.call("DELETE", f"/messages/{message}")


def assert_never_attempted(crew: Crew, place: Place, sink: Sink, hook: Hook) -> None:
    """A worker that comes delivers what is published after it, and nothing else."""
    crew.start("worker")
    place.await_state(place.publish("marker")["message_id"], hook.id, "delivered")
    assert [arrival.body for arrival in sink.arrivals(hook.path)] == [b'"marker"']


def assert_withdrawn(crew: Crew, place: Place, message: str, hook: Hook) -> None:
    found = place.delivery(message, hook.id)
    assert (found["state"], found["reason"]) == ("cancelled", "withdrawn")
    again = withdraw(crew, message)
    assert (again.status_code, again.json()["detail"]) == (
        409,
        "nothing could be withdrawn: 1 cancelled",
    )


@in_shapes("embedded")
def test_before_the_statement_of_a_withdrawal(crew: Crew, place: Place) -> None:
    """Nothing was withdrawn; asked again, it is."""
    hook = place.push()
    message = str(place.publish(17)["message_id"])
    ask(crew, crew.start("serve", "before withdrawal"), "DELETE", message)
    assert place.delivery(message, hook.id)["state"] == "queued"
    answer = withdraw(crew, message)
    assert [one["result"] for one in answer.json()["deliveries"]] == ["withdrawn"]
    assert place.steps(message, hook.id) == ["enqueued", "cancelled"]


@in_shapes("embedded", "relayed")
def test_after_the_commit_of_a_withdrawal_before_its_answer(
    crew: Crew, place: Place, sink: Sink
) -> None:
    """Keep the cancellation although its caller got no answer; the broker's copy is dropped on arrival."""
    hook = place.push()
    message = str(place.publish(17)["message_id"])
    ask(crew, crew.start("serve", "after withdrawal"), "DELETE", message)
    assert_withdrawn(crew, place, message, hook)
    assert_never_attempted(crew, place, sink, hook)
    assert place.steps(message, hook.id) == ["enqueued", "cancelled"]


@in_shapes("embedded")
@pytest.mark.parametrize("point", ["after claim", "after send"])
def test_what_a_dead_worker_had_can_be_withdrawn(
    crew: Crew, place: Place, sink: Sink, point: str
) -> None:
    """Lose a claim with its session: the message is claimed by no worker, and never attempted again."""
    hook = place.push()
    dying = crew.start("worker", point)
    message = str(place.publish(17)["message_id"])
    dying.await_death()
    answer = withdraw(crew, message)
    assert [one["result"] for one in answer.json()["deliveries"]] == ["withdrawn"]
    crew.start("worker")
    place.await_state(place.publish("marker")["message_id"], hook.id, "delivered")
    seen = [b"17"] if point == "after send" else []
    assert [arrival.body for arrival in sink.arrivals(hook.path)] == [*seen, b'"marker"']
    assert_withdrawn(crew, place, message, hook)


@in_shapes("relayed")
@pytest.mark.parametrize("point", ["after relay's claim", "after carrying"])
def test_what_a_dead_relay_had_can_be_withdrawn(
    crew: Crew, place: Place, sink: Sink, point: str
) -> None:
    """Claimed and not sent, or sent and not marked: the row is gone, so no relay sends it and no worker attempts it."""
    hook = place.push()
    with crew.without():
        dying = crew.start("relay", point)
        message = str(place.publish(17)["message_id"])
        dying.await_death()
        assert withdraw(crew, message).status_code == httpx.codes.OK
        assert_withdrawn(crew, place, message, hook)
        crew.start("relay")
        assert_never_attempted(crew, place, sink, hook)


@in_shapes("embedded")
def test_before_the_statement_of_a_move(crew: Crew, place: Place) -> None:
    """It is due when it was; asked again, it is moved."""
    hook = place.push()
    message = str(place.publish(17, delay_ms=HOUR_MS)["message_id"])
    due = place.delivery(message, hook.id)["due_at"]
    ask(crew, crew.start("serve", "before move"), "PATCH", message, {"delay_ms": 0})
    assert place.delivery(message, hook.id)["due_at"] == due
    answer = crew.call("PATCH", f"/messages/{message}", {"delay_ms": 0})
    assert [one["result"] for one in answer.json()["deliveries"]] == ["moved"]
    assert place.steps(message, hook.id) == ["enqueued", "restored"]


@in_shapes("embedded")
def test_a_message_moved_forward_is_delivered_without_a_notification(
    crew: Crew, place: Place, sink: Sink
) -> None:
    hook = place.push()
    message = str(place.publish(17, delay_ms=HOUR_MS)["message_id"])
    crew.start("worker")
    ask(crew, crew.start("serve", "after move"), "PATCH", message, {"delay_ms": 0})
    place.await_state(message, hook.id, "delivered")
    assert place.steps(message, hook.id) == ["enqueued", "restored", "attempted", "delivered"]
    assert [arrival.body for arrival in sink.arrivals(hook.path)] == [b"17"]


@in_shapes("relayed")
def test_what_was_put_off_is_not_delivered_though_a_copy_of_it_is_about(
    crew: Crew, place: Place, sink: Sink
) -> None:
    hook = place.push()
    message = str(place.publish(17)["message_id"])
    ask(crew, crew.start("serve", "after move"), "PATCH", message, {"delay_ms": HOUR_MS})
    assert_never_attempted(crew, place, sink, hook)
    assert place.steps(message, hook.id) == ["enqueued", "restored"]
    assert place.delivery(message, hook.id)["state"] == "scheduled"
