"""One forced kill of a relay between every two steps of its work, on a live Artemis: every copy arrives, and counts once."""

import pytest

from tests.support.process_group import Crew
from tests.support.room import Place
from tests.support.webhook_sink import Sink

pytestmark = pytest.mark.parametrize("broker_url", ["relayed"], indirect=True, scope="module")


@pytest.mark.parametrize(
    "point",
    ["after relay's claim", "before carrying", "after carrying", "before mark", "after mark"],
)
def test_a_relay_killed_at_any_step(crew: Crew, place: Place, sink: Sink, point: str) -> None:
    """Let the next relay take over the claims of a killed one.

    Messages that were sent already are dropped by the broker or fenced by their row: the endpoint sees each message
    once, and a poll gets it once.
    """
    hook, queue = place.push(), place.queue()
    with crew.without():
        dying = crew.start("relay", point)
        message = str(place.publish(17)["message_id"])
        dying.await_death()
        assert sink.arrivals(hook.path) == []
        crew.start("relay")
        crew.start("worker")
        place.await_state(message, hook.id, "delivered")
        assert [arrival.attempt for arrival in sink.arrivals(hook.path)] == [0]
        assert place.steps(message, hook.id) == ["enqueued", "attempted", "delivered"]
        assert place.delivery(message, queue)["state"] == "queued"
        assert [one["message_id"] for one in place.pull(queue, wait_ms=25_000)] == [message]
