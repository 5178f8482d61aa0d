"""Kill every process of a running service and its broker at random moments, under load."""

import asyncio
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from delivery.push import outcome_writer
from rooms.settings import read_settings
from tests.support.api_client import Client
from tests.support.load import Load, Uneven, loading
from tests.support.local_servers import TestServer
from tests.support.polling import until
from tests.support.room import Place
from tests.support.service import EMBEDDED, FULL, PROCESSES, Service, running
from tests.support.usage_counts import counts_of_log, counts_of_table
from tests.support.webhook_sink import Sink, sinking

SEED = 20_260_703
BROKER = "broker"
IN_TURN = {EMBEDDED: PROCESSES, FULL: (*PROCESSES, "relay", BROKER)}
KILLS = {EMBEDDED: 20, FULL: 12}
# A killed worker leaves attempts in doubt, a killed PostgreSQL loses claims, a killed broker neither.
HURTING = {"worker", "postgres"}
LONGEST_PAUSE_S = 0.6
PUBLISHERS = 4
PACE_S = 0.002
# Long enough that calls are in progress at any moment.
ANSWER_S = 0.03
LONGEST_S = 240.0
APPLICATION = "registry"

UNSETTLED = """
SELECT state::text, count(*) FROM deliveries WHERE room_id = %s AND state IN ('scheduled', 'queued', 'held', 'leased')
GROUP BY state
"""
FATES = """
SELECT d.message_id::text, d.id::text, d.subscription_id::text, d.state::text, d.reason FROM deliveries d
WHERE d.room_id = %s
"""
GAPS = """
SELECT writer_id, min(writer_seq), max(writer_seq), count(*), count(DISTINCT writer_seq) FROM delivery_log
GROUP BY writer_id HAVING min(writer_seq) <> 1 OR max(writer_seq) <> count(*) OR count(DISTINCT writer_seq) <> count(*)
"""
WHERE_LEFT = """
SELECT kind, attempt, claimed_until > now() AS claimed, worker, count(*), min(due_at) - now() FROM outbox WHERE room_id = %s
GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
"""
WORK_LEFT = """
SELECT (SELECT count(*) FROM outbox WHERE room_id = %(room)s), (SELECT count(*) FROM held WHERE room_id = %(room)s),
    (SELECT count(*) FROM leases WHERE room_id = %(room)s)
"""


@pytest.fixture(params=[EMBEDDED, FULL])
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def broker(shape: str, request: pytest.FixtureRequest) -> TestServer | None:
    """Start an Artemis that only this test uses, in the full shape."""
    if shape == EMBEDDED:
        return None
    start: Callable[[], TestServer] = request.getfixturevalue("artemis_server")
    return start()


@pytest.fixture
def service(
    tmp_path: Path, broker: TestServer | None, request: pytest.FixtureRequest
) -> Iterator[Service]:
    # Longer than the test: tasks of a killed worker come back because it is dead.
    settings = {"ROOMS_CLAIM_TTL_S": "3600"}
    if broker is not None:
        settings |= {
            "BROKER_URL": broker.url,
            "ELECTION_URL": request.getfixturevalue("zookeeper_url"),
            "ROOMS_FARM": f"kills-{os.getpid()}",
        }
    with running(tmp_path, settings=settings) as service:
        yield service


@pytest.fixture
def sink() -> Iterator[Sink]:
    with sinking() as sink:
        yield sink


@contextmanager
def loads_of_applications(service: Service, sink: Sink) -> Iterator[Sequence[Load]]:
    """Publish to another room with two keys, the second of which is bound to an application."""
    body = {"name": APPLICATION, "scopes": ["admin"], "application": APPLICATION}
    headers = {"Authorization": f"Bearer {service.post('/keys', body)['key']}"}
    place = Place.open(service, sink, delivery_delay_ms=50)
    place.push()
    with httpx.Client(base_url=service.url, headers=headers, timeout=60) as http:
        bound = replace(place, service=Client(http))
        queue = bound.queue()
        with (
            loading(place, queue, publishers=1, pace_s=PACE_S) as first,
            loading(bound, queue, publishers=1, pace_s=PACE_S) as second,
        ):
            yield first, second


def await_usage(service: Service, expected: Mapping[str, int]) -> None:
    """Wait until usage equals the log in every hour, organisation, event type and application.

    `expected`: the messages by application.
    """

    async def rows(statement: str) -> Sequence[Sequence[Any]]:
        return await asyncio.to_thread(service.rows, statement)

    async def both() -> tuple[Any, Any]:
        return await counts_of_log(rows), await counts_of_table(rows)

    def equal() -> bool:
        log, table = asyncio.run(both())
        messages: Counter[str] = Counter()
        for (*_, application, name), count in table.items():
            messages[application] += count if name == "messages" else 0
        return bool(log == table and +messages == expected)

    until(equal, lambda: f"usage to equal the log: {asyncio.run(both())}", within_s=LONGEST_S / 2)


def kill_one_after_another(
    service: Service,
    broker: TestServer | None,
    loads: Sequence[Load],
    victims: Sequence[str],
    dice: random.Random,
) -> None:
    pause = threading.Event()
    for number, name in enumerate(victims):
        pause.wait(dice.uniform(0, LONGEST_PAUSE_S))
        before, took_s = sum(len(load.accepted) for load in loads), ""
        if name == BROKER:
            assert broker is not None
            began = time.monotonic()
            broker.restart()
            took_s = f", back after {time.monotonic() - began:.1f} s"
        else:
            service.await_another(name, service.kill(name))
        for load in loads:
            load.await_progress()
        sys.stdout.write(f"kill {number + 1}: {name}{took_s}, {before} accepted so far\n")


def await_ends(service: Service, place: Place) -> None:
    """Wait until every delivery has ended: at least one in each minute, and all in four."""
    longest = time.monotonic() + LONGEST_S
    while left := sorted(service.rows(UNSETTLED, place.id)):
        assert time.monotonic() < longest, (
            f"{left} go round and round; {service.rows(WHERE_LEFT, place.id)}"
        )
        until(
            lambda before=left: sorted(service.rows(UNSETTLED, place.id)) != before,  # type: ignore[misc]
            f"any of {left} to move; {service.rows(WHERE_LEFT, place.id)}",
        )


def test_nothing_is_lost_whichever_process_is_killed(
    service: Service, sink: Sink, shape: str, broker: TestServer | None
) -> None:
    """Kill each process in turn, a broker too, while four publishers repeat requests without 202.

    Nothing is lost. Every message answered 202 is in the database, once for each idempotency key, with a
    delivery for each subscription. Each PUSH delivery is `delivered` and its webhook was called, or it is
    `sidelined` with a reason. Each PULL delivery is `delivered`, and the puller got its message.

    Only PUSH deliveries are doubled, with the same webhook-id and attempt, and no more than were in flight.
    A kill of the worker, or of PostgreSQL, which ends the worker's claims, finds at most
    `lane_concurrency` calls in progress in each lane. Outcomes that wait for a commit fill the current
    batch and the next one. So doubles <= kills of those two * (lanes * lane_concurrency + 2 * batch).

    The log has no gap: each writer's rows are numbered from 1, none missing and none doubled. Usage equals
    the log, also for a second room, in which an application publishes beside another key.

    The test prints how long after readiness everything is complete; `python -m tests.bench returns`
    compares that with 5 s.
    """
    in_turn, seed = IN_TURN[shape], SEED
    victims = [in_turn[number % len(in_turn)] for number in range(KILLS[shape])]
    sys.stdout.write(f"seed {seed}\n")
    place = Place.open(
        service,
        sink,
        delivery_delay_ms=50,
        delivery_delay_multiplier=1.5,
        delivery_attempts=20,
        delivery_max_delay_ms=500,
    )
    steady, uneven, queue = place.push("steady"), place.push("uneven"), place.queue()
    behaviours = {
        steady: Uneven(seed, 0.0, after_s=ANSWER_S),
        uneven: Uneven(seed, 0.1, after_s=ANSWER_S),
    }
    for hook, behaviour in behaviours.items():
        sink.behave(hook.path, behaviour)

    with (
        loads_of_applications(service, sink) as others,
        loading(place, queue, publishers=PUBLISHERS, pace_s=PACE_S) as load,
    ):
        kill_one_after_another(service, broker, (load, *others), victims, random.Random(seed))
        service.await_ready()
        ready_at = time.monotonic()
        for one in (load, *others):
            one.end_publishing()
        await_ends(service, place)
        took_s = time.monotonic() - ready_at

    sys.stdout.write(
        f"{len(load.accepted)} accepted, {load.repeated} requests repeated; complete {took_s:.2f} s after readiness\n"
    )
    assert [one.unexpected for one in (load, *others)] == [[], [], []]
    assert len(load.accepted) > 10 * len(victims), "there was no load to speak of"
    accepted = set(load.accepted.values())
    assert len(accepted) == len(load.accepted)
    assert service.rows("SELECT count(*) FROM messages WHERE room_id = %s", place.id) == [
        (len(accepted),)
    ]

    fates: dict[str, dict[str, tuple[str, str, str | None]]] = {}
    for message, delivery, subscription, state, reason in service.rows(FATES, place.id):
        fates.setdefault(subscription, {})[message] = (delivery, state, reason)
    assert set(fates) == {steady.id, uneven.id, queue}
    for hook, behaviour in behaviours.items():
        assert fates[hook.id].keys() == accepted
        came = set(behaviour.succeeded)
        for delivery, state, reason in fates[hook.id].values():
            assert (state == "delivered" and delivery in came) or (
                state == "sidelined" and reason
            ), (delivery, state)
    assert fates[queue].keys() == accepted
    assert {state for _, state, _ in fates[queue].values()} == {"delivered"}
    assert accepted <= load.received
    assert load.acknowledged <= accepted
    assert service.rows(WORK_LEFT, room=place.id) == [(0, 0, 0)]

    arrivals = [arrival for hook in behaviours for arrival in sink.arrivals(hook.path)]
    known = {delivery for hook in behaviours for delivery, _, _ in fates[hook.id].values()}
    assert {arrival.webhook_id for arrival in arrivals} <= known
    doubles = len(arrivals) - len(
        Counter((arrival.webhook_id, arrival.attempt) for arrival in arrivals)
    )
    after_success = sum(len(one.succeeded) - len(set(one.succeeded)) for one in behaviours.values())
    hurting = sum(victim in HURTING for victim in victims)
    in_flight = len(behaviours) * read_settings({}).lane_concurrency + 2 * outcome_writer._BATCH
    sys.stdout.write(
        f"{len(arrivals)} webhooks, {doubles} doubled, {after_success} after a success\n"
    )
    assert doubles <= hurting * in_flight
    assert after_success <= hurting * in_flight
    assert service.rows(GAPS) == []
    of_none, of_registry = (len(one.accepted) for one in others)
    await_usage(service, {"": len(load.accepted) + of_none, APPLICATION: of_registry})
