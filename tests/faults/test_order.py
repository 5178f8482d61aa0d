"""Order per key seen from outside: several workers, webhooks that fail by chance, and workers that are killed."""

import itertools
import json
import random
import threading
from collections import defaultdict

import pytest

from tests.support.polling import until
from tests.support.process_group import Crew
from tests.support.room import EVENT_TYPE, Place
from tests.support.webhook_sink import Arrival, Reply, Sink

pytestmark = pytest.mark.parametrize(
    "broker_url", ["embedded", "relayed"], indirect=True, scope="module"
)

KEYS = 6
MESSAGES = 12
WORKERS = 4
KILLS = 2


class Moody:
    """Fail a fifth of the calls by chance, and every call of the key `bad` while the fault is set."""

    def __init__(self) -> None:
        self._draw = random.Random(17).random
        self._turn = threading.Lock()
        self.bad = True

    def __call__(self, arrival: Arrival) -> Reply:
        key, _ = json.loads(arrival.body)
        with self._turn:
            fails = self._draw() < 0.2 or (key == "bad" and self.bad)
        return Reply(status=503 if fails else 204, after_s=0.005)


def by_key(sink: Sink, path: str) -> dict[str, list[int]]:
    """The numbers that came, by their key, in the order in which they came."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for arrival in sink.arrivals(path):
        key, number = json.loads(arrival.body)
        found[key].append(number)
    return found


def test_each_key_comes_in_order_whichever_process_dies(
    crew: Crew, sink: Sink, place: Place
) -> None:
    """Kill two of four workers; messages of a key never arrive out of order.

    A number arrives again (a retry, or the doubtful one) only until the next one arrives. A key whose first message keeps failing blocks the later messages
    of that key, and no other key. In the end everything was delivered, and no ordering row is left.
    """
    hook = place.push(
        ordered=True, delivery_delay_ms=100, delivery_delay_multiplier=1, delivery_attempts=1000
    )
    moody = Moody()
    sink.behave(hook.path, moody)
    workers = [crew.start("worker") for _ in range(WORKERS)]
    crew.start("upkeep")
    keys = [*(f"k{number}" for number in range(KEYS)), "bad"]
    for number in range(0, MESSAGES, 3):
        batch = [
            {"event_type": EVENT_TYPE, "payload": [key, one], "ordering_key": key}
            for key, one in itertools.product(keys, range(number, number + 3))
        ]
        crew.post(f"{place.at}/messages/batch", {"messages": batch})
    for victim in range(KILLS):
        sink.wait(hook.path, (victim + 1) * 20)
        workers[victim].kill()

    good = {key: MESSAGES - 1 for key in keys if key != "bad"}
    until(
        lambda: all(
            (by_key(sink, hook.path).get(key) or [-1])[-1] == last for key, last in good.items()
        ),
        "the keys whose messages get through",
    )
    assert set(by_key(sink, hook.path)["bad"]) == {0}, (
        "what stands behind the one that fails is kept back"
    )
    moody.bad = False
    until(
        lambda: (
            crew.rows("SELECT count(*) FROM ordered_keys WHERE room_id = %s", place.id) == [(0,)]
        ),
        "every key to come to its end",
    )
    for key, numbers in by_key(sink, hook.path).items():
        assert numbers == sorted(numbers), f"{key} goes back"
        assert set(numbers) == set(range(MESSAGES)), f"{key} lacks something"
    states = "SELECT DISTINCT state::text FROM deliveries WHERE room_id = %s"
    assert crew.rows(states, place.id) == [("delivered",)]
    assert crew.rows("SELECT count(*) FROM ordered_waiting WHERE room_id = %s", place.id) == [(0,)]
