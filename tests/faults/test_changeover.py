"""An installation whose broker becomes another one, and PostgreSQL again: everything that was accepted is delivered."""

import os
from itertools import count

from rooms.domain import work_location as places
from tests.support.api_client import Client
from tests.support.polling import until
from tests.support.process_group import Crew
from tests.support.room import Place
from tests.support.webhook_sink import Sink

MESSAGES = 30
_NUMBERS = count(1)


def in_the_outbox(crew: Crew, place: Place, kind: places.WorkLocation) -> int:
    ((found,),) = crew.rows(
        "SELECT count(*) FROM outbox WHERE room_id = %s AND kind = %s", place.id, int(kind)
    )
    return int(found)


def all_delivered(crew: Crew, place: Place, expected: int) -> None:
    states = "SELECT state::text, count(*) FROM deliveries WHERE room_id = %s GROUP BY state"
    until(
        lambda: crew.rows(states, place.id) == [("delivered", expected)],
        "everything to be delivered",
    )


def pull_all(place: Place, queue: str, expected: int) -> None:
    """So many messages come, each once."""
    pulled: list[str] = []
    while len(pulled) < expected:
        messages = place.pull(queue, most=100, wait_ms=25_000)
        assert messages, f"{len(pulled)} of {expected} came"
        pulled += [message["message_id"] for message in messages]
        place.settle(queue, "ack", *(message["ack_id"] for message in messages))
    assert len(set(pulled)) == len(pulled) == expected


def test_a_broker_is_turned_on_off_and_on_over_unfinished_work(
    crew: Crew, place: Place, sink: Sink, artemis_url: str
) -> None:
    """Change the broker mode twice: work is in PostgreSQL, in the broker, and in PostgreSQL again.

    An API process of the former mode has put it there. Oracle: each message comes once, and old
    messages in the broker have no effect.
    """
    embedded = crew.broker
    relayed = {
        "BROKER_URL": artemis_url,
        "ROOMS_CLIENT": f"changeover-{os.getpid()}-{next(_NUMBERS)}",
    }
    hook, queue = place.push(), place.queue()
    for number in range(MESSAGES):
        place.publish(number)
    crew.broker = relayed
    first = [crew.start("upkeep"), crew.start("relay")]
    until(
        lambda: (
            in_the_outbox(crew, place, places.WorkLocation.PUSH_AT_BROKER)
            == in_the_outbox(crew, place, places.WorkLocation.PULL_AT_BROKER)
            == MESSAGES
        ),
        "everything to be in the broker",
    )
    assert sink.arrivals(hook.path) == []
    for process in first:
        process.kill()

    crew.broker = embedded
    second = [crew.start("upkeep"), crew.start("worker")]
    pull_all(place, queue, MESSAGES)
    all_delivered(crew, place, 2 * MESSAGES)
    assert len(sink.arrivals(hook.path)) == MESSAGES
    for process in second:
        process.kill()

    for number in range(MESSAGES):
        place.publish(number)
    crew.broker = relayed
    for command in ("upkeep", "relay", "worker"):
        crew.start(command)
    with crew.at(crew.start("serve")) as http:
        place.service = Client(http)
        pull_all(place, queue, MESSAGES)
    all_delivered(crew, place, 4 * MESSAGES)
    arrivals = sink.arrivals(hook.path)
    assert len(arrivals) == len({arrival.webhook_id for arrival in arrivals}) == 2 * MESSAGES
