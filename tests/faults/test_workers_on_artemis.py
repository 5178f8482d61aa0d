"""Kill and suspend workers that consume from Artemis.

The oracle: nothing accepted is lost, and only deliveries that were in progress come twice.
"""

import os
import signal
import time
from collections import Counter

import pytest

from delivery.push import outcome_writer
from delivery.push.concurrency import INITIAL_LIMIT
from rooms.settings import read_settings
from tests.support.polling import until
from tests.support.process_group import Crew
from tests.support.room import Place
from tests.support.webhook_sink import Arrival, Reply, Sink

MESSAGES = 240
KILLS = 3
EACH = 20
CLAIM_S = 8
SHORTER = "UPDATE outbox SET claimed_until = now() + %s * interval '1 s' WHERE room_id = %s AND claimed_until > now()"
"""Shortens claims, but not below the time after which the broker drops a silent consumer."""
pytestmark = pytest.mark.parametrize("broker_url", ["relayed"], indirect=True, scope="module")


def states(crew: Crew, place: Place) -> dict[str, int]:
    found = crew.rows(
        "SELECT state::text, count(*) FROM deliveries WHERE room_id = %s GROUP BY state", place.id
    )
    return {row[0]: row[1] for row in found}


def all_delivered(crew: Crew, place: Place, count: int) -> None:
    until(lambda: states(crew, place) == {"delivered": count}, f"{count} deliveries", within_s=90)


def doubles(arrivals: list[Arrival]) -> int:
    counted = Counter((arrival.webhook_id, arrival.attempt) for arrival in arrivals)
    return len(arrivals) - len(counted)


def test_workers_killed_under_load_lose_nothing(crew: Crew, place: Place, sink: Sink) -> None:
    """Kill one of two workers again and again.

    The other gets its tasks at once. Only attempts in progress, or not committed yet, are repeated.
    """
    hooks = [place.push(f"hook-{number}") for number in range(4)]
    for hook in hooks:
        sink.behave(hook.path, lambda _arrival: Reply(after_s=0.02))
    crew.start("worker")
    doomed = crew.start("worker")
    for kill in range(KILLS):
        for number in range(MESSAGES // KILLS):
            place.publish(number)
        so_far = (kill + 1) * MESSAGES // KILLS
        until(lambda most=so_far: len(sink.arrivals(hooks[0].path)) > most // 4, "calls under way")  # type: ignore[misc]
        os.kill(doomed.process.pid, signal.SIGKILL)
        doomed.await_death()
        doomed = crew.start("worker")
    all_delivered(crew, place, MESSAGES * len(hooks))
    arrivals = [arrival for hook in hooks for arrival in sink.arrivals(hook.path)]
    assert len({arrival.webhook_id for arrival in arrivals}) == MESSAGES * len(hooks)
    in_flight = len(hooks) * read_settings({}).lane_concurrency + outcome_writer._BATCH
    assert doubles(arrivals) <= KILLS * in_flight
    log = crew.rows(
        "SELECT count(*) FROM delivery_log WHERE room_id = %s AND kind = 'delivered'", place.id
    )
    assert log == [(MESSAGES * len(hooks),)]
    assert crew.rows("SELECT count(*) FROM outbox WHERE room_id = %s", place.id) == [(0,)]


def test_endpoints_that_hang_delay_no_other(crew: Crew, place: Place, sink: Sink) -> None:
    """Let twelve endpoints hang beside twenty healthy ones in one queue.

    The healthy ones get their messages, and those of the others are held, before the calls time out.
    """
    hanging = [place.push(f"hanging-{number}", timeout_ms=30_000) for number in range(12)]
    healthy = [place.push(f"healthy-{number}") for number in range(20)]
    for hook in hanging:
        sink.script(hook.path, then=0)
    crew.start("worker")
    for number in range(EACH):
        place.publish(number)

    def served() -> bool:
        return all(len(sink.arrivals(hook.path)) == EACH for hook in healthy)

    until(served, "everything for the healthy", within_s=60)
    slots = INITIAL_LIMIT
    rest = (EACH - slots) * len(hanging)
    held = "SELECT count(*) FROM held WHERE room_id = %s AND reason = 'saturated'"
    until(lambda: crew.rows(held, place.id) == [(rest,)], "the rest to be held", within_s=60)
    place.publish("once more")
    until(
        lambda: all(len(sink.arrivals(hook.path)) == EACH + 1 for hook in healthy),
        "the healthy once more",
        within_s=60,
    )
    assert all(len(sink.arrivals(hook.path)) <= slots for hook in hanging)


def test_tasks_of_a_suspended_worker_go_to_another_in_the_end(
    crew: Crew, place: Place, sink: Sink
) -> None:
    """Suspend a worker: another gets its messages once the broker drops it.

    They are attempted again when the claims end, not before. The results of the first worker, when it
    resumes, change nothing.
    """
    hook = place.push(timeout_ms=20_000)
    sink.script(hook.path, 0)
    crew.broker = {**crew.broker, "BROKER_URL": f"{crew.broker['BROKER_URL']}?heartbeat_ms=1000"}
    frozen = crew.start("worker")
    message = place.publish(17)["message_id"]
    sink.wait(hook.path)
    os.kill(frozen.process.pid, signal.SIGSTOP)
    try:
        now = time.monotonic()
        crew.rows(f"{SHORTER} RETURNING 1", CLAIM_S, place.id)
        crew.start("worker")
        place.await_state(message, hook.id, "delivered")
        (first, second) = sink.arrivals(hook.path)
        assert first.webhook_id == second.webhook_id
        assert second.at - now > CLAIM_S - 0.1, "while the claim was the other's"
    finally:
        os.kill(frozen.process.pid, signal.SIGCONT)
    other = place.publish(18)["message_id"]
    place.await_state(other, hook.id, "delivered")
    assert place.delivery(message, hook.id)["attempts"] == 1
    assert place.steps(message, hook.id).count("delivered") == 1
