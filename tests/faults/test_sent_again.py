"""Send to Artemis again under a known delivery id; every new version arrives.

The detection of duplicates is for repeated sends of one version, and each return into the queue is a new version.
"""

from collections.abc import Callable

import pytest

from tests.support.polling import until
from tests.support.process_group import Crew
from tests.support.room import Hook, Place
from tests.support.webhook_sink import Sink

RETRIES = 2
CALLS = RETRIES + 1
pytestmark = pytest.mark.parametrize("broker_url", ["relayed"], indirect=True, scope="module")


@pytest.fixture(autouse=True)
def at_work(crew: Crew) -> None:
    """Besides API and relay: who delivers, and who ends leases and does jobs."""
    crew.start("worker")
    crew.start("upkeep")


@pytest.fixture
def place(crew: Crew, sink: Sink) -> Place:
    return Place.open(crew, sink, delivery_delay_ms=50, delivery_attempts=RETRIES)


def redelivered(crew: Crew, place: Place, hook: Hook, delivery: str) -> None:
    crew.post(f"/deliveries/{delivery}/redeliver")


def shoveled(crew: Crew, place: Place, hook: Hook, delivery: str) -> None:
    job = crew.post(f"/subscriptions/{hook.id}/sideline/shovel", {})
    until(lambda: crew.get(f"/jobs/{job['job_id']}")["state"] == "done", "the shovel to be done")


@pytest.mark.parametrize("send_again", [redelivered, shoveled])
def test_what_is_sidelined_comes_again_each_time_it_is_sent_again(
    crew: Crew, place: Place, sink: Sink, send_again: Callable[[Crew, Place, Hook, str], None]
) -> None:
    """Its attempts are counted anew: the same delivery and attempt as before, three times over."""
    hook = place.push()
    sink.script(hook.path, *[503] * CALLS * 2)
    message = place.publish(17)["message_id"]
    for times in (1, 2):
        until(lambda most=times: len(sink.arrivals(hook.path)) == most * CALLS, "the attempts")  # type: ignore[misc]
        place.await_state(message, hook.id, "sidelined")
        send_again(crew, place, hook, place.delivery(message, hook.id)["id"])
    place.await_state(message, hook.id, "delivered")
    assert [arrival.attempt for arrival in sink.arrivals(hook.path)] == [
        *range(CALLS),
        *range(CALLS),
        0,
    ]
    assert {arrival.webhook_id for arrival in sink.arrivals(hook.path)} == {
        place.delivery(message, hook.id)["id"]
    }


def test_what_a_pull_gave_back_or_let_run_out_comes_again(crew: Crew, place: Place) -> None:
    queue = place.queue()
    message = place.publish(17)["message_id"]

    def next_one(attempt: int, lease_ms: int = 30_000) -> str:
        (found,) = place.pull(queue, wait_ms=25_000, lease_ms=lease_ms)
        assert (found["message_id"], found["attempt"]) == (message, attempt)
        return str(found["ack_id"])

    next_one(0, lease_ms=1000)
    assert place.settle(queue, "nack", next_one(1)).json()["results"][0]["status"] == "nacked"
    next_one(2, lease_ms=1000)
    assert place.settle(queue, "ack", next_one(3)).json()["results"][0]["status"] == "acked"
    assert place.steps(message, queue).count("lease_ended") == 2


def test_what_was_held_comes_when_it_is_released(crew: Crew, place: Place, sink: Sink) -> None:
    """Paused while its copy was in the broker: held, and released under the attempt it was held at."""
    hook = place.push()
    crew.post(f"/subscriptions/{hook.id}/pause")
    message = place.publish(17)["message_id"]
    place.await_state(message, hook.id, "held")
    crew.post(f"/subscriptions/{hook.id}/resume")
    place.await_state(message, hook.id, "delivered")
    assert [arrival.attempt for arrival in sink.arrivals(hook.path)] == [0]
