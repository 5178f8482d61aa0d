"""Kill workers while a circuit is open.

Oracle: whichever process dies, everything is delivered in the end. While the circuit is open, the endpoint sees one
probe in a period, with any number of workers. Messages with an ordering key arrive in order.
"""

import itertools
import json
import os
import signal
import time
from collections import Counter
from typing import Any, Final

import pytest

from tests.faults.test_workers_on_artemis import all_delivered
from tests.support.polling import until
from tests.support.process_group import Crew
from tests.support.room import EVENT_TYPE, Place
from tests.support.webhook_sink import Reply, Sink

OPEN_MS: Final = 500
DRAIN_PER_S: Final = 100.0
MESSAGES: Final = 216
KEYS: Final = ("a", "b", "c")
pytestmark = pytest.mark.parametrize(
    "broker_url", ["embedded", "relayed"], indirect=True, scope="module"
)


def lane(crew: Crew, subscription: str) -> dict[str, Any]:
    found: dict[str, Any] = crew.get(f"/subscriptions/{subscription}/lane")
    return found


@pytest.mark.parametrize(
    "point", ["after opening the circuit", "after probe", "before closing the circuit"]
)
def test_a_worker_that_dies_at_the_circuit_leaves_nothing_behind(
    crew: Crew, place: Place, sink: Sink, point: str
) -> None:
    """Held or queued, never neither: both messages come, and the circuit is closed in the end."""
    hook = place.push(circuit_failures=1, circuit_open_ms=OPEN_MS, delivery_attempts=50)
    sink.script(hook.path, 500)
    dying = crew.start("worker", point)
    messages = [place.publish(1)["message_id"]]
    dying.await_death()
    messages.append(place.publish(2)["message_id"])
    crew.start("worker")
    for message in messages:
        place.await_state(message, hook.id, "delivered")
    until(lambda: lane(crew, hook.id)["circuit"]["state"] == "closed", "the circuit to be closed")
    counted = Counter((arrival.webhook_id, arrival.attempt) for arrival in sink.arrivals(hook.path))
    assert sum(counted.values()) <= len(counted) + 1, "no more than what was under way comes twice"
    assert lane(crew, hook.id)["held"] == {}


def test_a_dead_endpoint_under_traffic_sees_probes_alone_and_then_a_drain_at_its_rate(
    crew: Crew, place: Place, sink: Sink
) -> None:
    """Kill one of two workers twice; then the endpoint is back, and nothing is lost.

    Half of the messages have ordering keys; heads and later messages share one rate.
    """
    hook = place.push(
        circuit_failures=3,
        circuit_open_ms=OPEN_MS,
        drain_per_s=DRAIN_PER_S,
        delivery_attempts=1000,
        delivery_delay_multiplier=1,  # what has failed is held again soon, and not due in the middle of the drain
        max_concurrency=2,
        ordered=True,
    )
    dead = [True]
    sink.behave(hook.path, lambda _arrival: Reply(status=503 if dead[0] else 204))
    crew.start("worker")
    doomed = crew.start("worker")
    kills, accepted = 2, 0
    numbers = itertools.count()
    place.publish([None, next(numbers)])
    until(
        lambda: lane(crew, hook.id)["circuit"]["state"] in {"open", "half_open"},
        "the circuit to be open",
    )
    time_open, sent_open = time.monotonic(), len(sink.arrivals(hook.path))
    for _ in range(kills):
        for _ in range(3):
            keys = [None, *KEYS, None, None] * (MESSAGES // kills // 3 // (len(KEYS) + 3))
            batch = [
                {"event_type": EVENT_TYPE, "payload": [key, next(numbers)]}
                | ({"ordering_key": key} if key else {})
                for key in keys
            ]
            crew.post(f"{place.at}/messages/batch", {"messages": batch})
            accepted += len(batch)
            until(lambda most=accepted: held(crew, hook.id) >= most - 5, "the messages to be held")  # type: ignore[misc]
        os.kill(doomed.process.pid, signal.SIGKILL)
        doomed.await_death()
        doomed = crew.start("worker")
    probes = len(sink.arrivals(hook.path)) - sent_open
    # What was under way in each worker when it opened, a probe in each period, and one that a killed worker had.
    assert probes <= 2 * 2 + (time.monotonic() - time_open) * 1000 / OPEN_MS + 1 + kills
    dead[0], back = False, time.monotonic()
    all_delivered(crew, place, accepted + 1)
    arrivals = sink.arrivals(hook.path)
    drained = [arrival.at for arrival in arrivals if arrival.at > back]
    assert len(drained) >= accepted - 5
    # The probe, the next of its key, and what a killed worker had are beside the drain.
    for number, at in enumerate(drained, 1):
        assert number <= 2 + kills + DRAIN_PER_S * (0.2 + at - back)
    for key in KEYS:
        seen = [
            number
            for name, number in (json.loads(arrival.body) for arrival in arrivals)
            if name == key
        ]
        assert seen == sorted(seen), f"{key} goes back"
        assert len(set(seen)) == MESSAGES // (len(KEYS) + 3)
    assert crew.rows("SELECT count(*) FROM held WHERE room_id = %s", place.id) == [(0,)]


def held(crew: Crew, subscription: str) -> int:
    return sum(lane(crew, subscription)["held"].values())
