"""A consumer that checks sequence numbers finds what was planted, and nothing else.

The consumers are a webhook endpoint, a PULL consumer, readers of a stream by Server-Sent Events and
by WebSocket and, with Artemis, a reader of a native queue. Each knows only what it receives.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.polling import until
from tests.support.process_group import Crew
from tests.support.room import EVENT_TYPE, LEASE_MS, Place
from tests.support.sequence_consumers import (
    Consumer,
    Decision,
    Endpoint,
    NativeReader,
    Puller,
    Reader,
    Refusals,
    SocketReader,
    StreamReader,
    reading,
)
from tests.support.webhook_sink import Sink

pytestmark = pytest.mark.parametrize(
    "broker_url", ["embedded", "relayed"], indirect=True, scope="module"
)

HOUR_MS = 3_600_000
KEYS = [f"k{number}" for number in range(4)]
MESSAGES = 12
LAST_OF_DOOMED_API = 4
WORKERS = 3
CHANCE = 0.2
SHORT_LEASE_MS = 2000
"""The time after which messages come again that a killed API has leased."""

LEFT = """
SELECT subscription_id::text, state::text FROM deliveries
WHERE room_id = %s AND state IN ('scheduled', 'queued', 'held', 'leased', 'sidelined')
"""
DONE = """
SELECT count(*) FROM deliveries WHERE subscription_id = %s AND state IN ('delivered', 'handed_over')
"""


@dataclass
class Scene:
    """One room with an ordered subscription of each kind, and its consumers by subscription."""

    crew: Crew
    place: Place
    consumers: dict[str, Consumer]
    hook: str

    @property
    def relayed(self) -> bool:
        return bool(self.crew.broker)

    def publish(self, key: str, first: int, *fields: dict[str, Any]) -> list[str]:
        """Publish consecutive messages of a key, the first with this number; return their ids."""
        messages = [
            {"event_type": EVENT_TYPE, "payload": [key, n], "ordering_key": key, **more}
            for n, more in enumerate(fields, first)
        ]
        made = self.crew.post(f"{self.place.at}/messages/batch", {"messages": messages})
        return [one["message_id"] for one in made["messages"]]

    def left(self) -> set[tuple[str, str]]:
        """Return (subscription, state) of what has not ended."""
        return {(who, state) for who, state in self.crew.rows(LEFT, self.place.id)}

    def await_states(self, message: str, state: str) -> None:
        """Wait until a message's deliveries to all subscriptions are in one state."""
        asked = "SELECT DISTINCT state::text FROM deliveries WHERE room_id = %s AND message_id = %s"
        until(
            lambda: self.crew.rows(asked, self.place.id, message) == [(state,)],
            f"all deliveries to be {state}",
        )

    def start_jobs(self, path: str, body: Any, *subscriptions: str) -> list[str]:
        """Start a job for each of these subscriptions, or all; return their ids."""
        return [
            self.crew.post(f"/subscriptions/{one}/{path}", body)["job_id"]
            for one in subscriptions or self.consumers
        ]

    def await_jobs(self, *jobs: str) -> None:
        """Wait for the end of jobs."""
        until(
            lambda: all(self.crew.get(f"/jobs/{job}")["state"] == "done" for job in jobs),
            "the jobs to be done",
        )

    def run_jobs(self, path: str, body: Any, *subscriptions: str) -> None:
        """Run a job for each of these subscriptions, or all."""
        self.await_jobs(*self.start_jobs(path, body, *subscriptions))

    def settle(self) -> None:
        """Shovel what is sidelined until every delivery has ended, and was processed."""

        def ended() -> bool:
            left = self.left()
            # What is held waits for a sidelined one; the rest may be sidelined yet.
            sidelined = {who for who, state in left if state == "sidelined"}
            if sidelined and {state for _, state in left} <= {"sidelined", "held"}:
                self.run_jobs("sideline/shovel", {}, *sidelined)
            return not left

        until(ended, lambda: f"the end of {self.left()}")
        # A native delivery has ended when the broker has it, which may be before it is read.
        until(
            lambda: all(
                self.crew.rows(DONE, one) == [(len(consumer.accepted),)]
                for one, consumer in self.consumers.items()
            ),
            "the consumers to have what was delivered",
        )


@contextmanager
def opened(
    crew: Crew,
    sink: Sink,
    refusals: Callable[[str], Refusals],
    *apis: httpx.Client,
    lease_ms: int = LEASE_MS,
) -> Iterator[Scene]:
    """Open a room whose consumers read from the first of these APIs, and are given these refusals.

    A delivery that fails twice is sidelined.
    """
    place = Place.open(
        crew, sink, delivery_delay_ms=50, delivery_delay_multiplier=1, delivery_attempts=1
    )
    hook = place.push(ordered=True)
    endpoint = Endpoint(refusals("push"))
    sink.behave(hook.path, endpoint)
    readers: dict[str, Reader] = {}
    kinds = {"pull": Puller, "events": StreamReader, "socket": SocketReader}
    for name, kind in kinds.items():
        queue = place.queue(name, ordered=True, max_receives=2)
        readers[queue] = kind(refusals(name), queue=queue, apis=[*apis], lease_ms=lease_ms)
    if crew.broker:
        body = {"name": "native", "type": "PULL", "native": True, "ordered": True}
        made = crew.post(f"{place.at}/subscriptions", body)
        readers[made["id"]] = NativeReader(refusals("native"), login=made["login"])
    with reading(list(readers.values())):
        yield Scene(crew, place, {hook.id: endpoint, **readers}, hook.id)


def test_no_number_is_lost_whatever_fails_and_dies(crew: Crew, sink: Sink) -> None:
    """Fail by chance, shovel and replay, and kill an API, workers, a relay and maintenance.

    Oracle: each consumer gets 1 to n of each key, and each number stands for the message that was
    published in that place. Its repetitions are exactly the messages that came again, all that it
    refused or that were replayed among them.
    """
    doomed = crew.start("serve", "after publish")
    doomed_api = crew.at(doomed)
    seeds = itertools.count()

    def refusals(_kind: str) -> Refusals:
        return Refusals(chance=CHANCE, seed=next(seeds))

    with opened(crew, sink, refusals, doomed_api, crew.http, lease_ms=SHORT_LEASE_MS) as scene:
        at = f"/v1{scene.place.at}/messages/batch"

        def publish(number: int, api: httpx.Client) -> list[dict[str, Any]]:
            messages = [
                {"event_type": EVENT_TYPE, "payload": [key, number], "ordering_key": key}
                for key in KEYS
            ]
            headers = {"Idempotency-Key": f"batch-{number}"}
            answer = api.post(at, json={"messages": messages}, headers=headers)
            assert answer.status_code == httpx.codes.ACCEPTED, answer.text
            found: list[dict[str, Any]] = answer.json()["messages"]
            return found

        if scene.relayed:
            with crew.without():
                relay = crew.start("relay", "after carrying")
                (first, *_) = publish(1, crew.http)
                relay.await_death()
        else:
            (first, *_) = publish(1, crew.http)
        crew.start("worker", "after send").await_death()
        workers = [crew.start("worker") for _ in range(WORKERS)]
        upkeep = crew.start("upkeep", "after replaying")
        for number in range(2, MESSAGES + 1):
            if number == LAST_OF_DOOMED_API:
                with pytest.raises(httpx.TransportError):
                    publish(number, doomed_api)
                doomed.await_death()
            publish(number, crew.http)
            if number == MESSAGES // 2:
                sink.wait(f"/{scene.place.id}/hook", len(KEYS) + 2)
                workers[0].kill()
        workers[1].kill()
        scene.settle()
        replay = {"from_message_id": first["message_id"], "ordering_keys": KEYS[:1]}
        jobs = scene.start_jobs("replay", replay)
        upkeep.await_death()
        crew.start("upkeep")
        scene.await_jobs(*jobs)
        scene.settle()

    again = {(KEYS[0], number) for number in range(1, MESSAGES + 1)}
    for who, consumer in scene.consumers.items():
        checker = consumer.checker
        assert checker.gaps() == {}, who
        assert checker.last() == dict.fromkeys(KEYS, MESSAGES), who
        assert checker.contradictions() == [], who
        assert consumer.misnumbered == [], who
        assert checker.replayed() == again, who
        repeated = checker.repetitions()
        assert repeated == {
            tuple(json.loads(payload)): count - 1
            for payload, count in consumer.counted.items()
            if count > 1
        }
        for place in again | consumer.refusals.made.keys():
            expected = consumer.refusals.made[place] + (place in again)
            assert repeated[place] >= expected, f"{who} {place}"
        assert consumer.refusals.made, who


PLANTED = {
    ("retried", 2): [Decision.RETURN],
    ("lapsed", 1): [Decision.LAPSE],
    ("shoveled", 1): [Decision.RETURN] * 2,
    ("redelivered", 2): [Decision.RETURN] * 2,
}
# A native client's rejection sidelines at once, and it returns as often as it likes.
PLANTED_NATIVE = {
    **PLANTED,
    ("shoveled", 1): [Decision.REJECT],
    ("redelivered", 2): [Decision.REJECT],
}


def test_what_is_named_is_what_was_planted(crew: Crew, sink: Sink) -> None:
    """Plant gaps and repetitions, each in a key of its own, with nothing else going wrong.

    Oracle: the consumer of each kind names exactly these, and a delivery that comes late closes its
    gap.
    """

    def refusals(kind: str) -> Refusals:
        return Refusals(PLANTED_NATIVE if kind == "native" else PLANTED)

    with opened(crew, sink, refusals, crew.http) as scene:
        now: dict[str, Any] = {}
        later = {"delay_ms": HOUR_MS}
        # A worker dies with the answer to its call.
        scene.publish("killed", 1, now)
        crew.start("worker", "after send").await_death()
        for _ in range(2):
            crew.start("worker")
        crew.start("upkeep")

        _, _, scheduled, *_ = scene.publish("withdrawn", 1, now, now, later, now, now)
        crew.call("DELETE", f"/messages/{scheduled}").raise_for_status()
        heads = [scene.publish("behind", 1, later, now, now, now)]
        crew.call("DELETE", f"/messages/{heads[0][2]}").raise_for_status()
        heads.append(scene.publish("expired", 1, later, {"ttl_ms": 1000}, now))
        heads.append(scene.publish("late", 1, later, now, now))
        crew.call("DELETE", f"/messages/{heads[2][1]}").raise_for_status()
        heads.append(scene.publish("lost", 1, later, now, now))
        lose = (
            "WITH d AS (DELETE FROM deliveries WHERE message_id = %s RETURNING id),"
            " h AS (DELETE FROM held WHERE id IN (SELECT id FROM d)),"
            " w AS (DELETE FROM ordered_waiting WHERE id IN (SELECT id FROM d)) SELECT count(*) FROM d"
        )
        assert crew.rows(lose, heads[3][1]) == [(len(scene.consumers),)]
        scene.await_states(heads[1][1], "expired")
        for first, *_ in heads:
            crew.call("PATCH", f"/messages/{first}", {"delay_ms": 0}).raise_for_status()

        scene.publish("retried", 1, now, now, now)
        scene.publish("lapsed", 1, now, now)
        shoveled, _ = scene.publish("shoveled", 1, now, now)
        _, redelivered, _ = scene.publish("redelivered", 1, now, now, now)
        replayed, *_ = scene.publish("replayed", 1, now, now)
        scene.await_states(redelivered, "sidelined")
        for message in (redelivered, heads[2][1]):
            for one in crew.get(f"/messages/{message}/deliveries")["items"]:
                crew.post(f"/deliveries/{one['id']}/redeliver")
        scene.await_states(shoveled, "sidelined")
        scene.settle()
        replay = {"from_message_id": replayed, "ordering_keys": ["replayed"]}
        scene.run_jobs("replay", replay)
        scene.settle()

        # What a subscription skips is missing for this subscription, and for no other.
        crew.post(f"/subscriptions/{scene.hook}/pause")
        scene.publish("skipped", 1, now, now)
        scene.run_jobs("skip-to-now?confirm=hook", None, scene.hook)
        crew.post(f"/subscriptions/{scene.hook}/resume")
        scene.publish("skipped", 3, now)
        scene.settle()

    gaps = {"withdrawn": [3], "behind": [3], "expired": [2], "lost": [2]}
    for who, consumer in scene.consumers.items():
        checker = consumer.checker
        assert checker.gaps() == gaps | ({"skipped": [1, 2]} if who == scene.hook else {}), who
        repetitions = {place: len(made) for place, made in consumer.refusals.planted.items()}
        repetitions |= {("replayed", 1): 1, ("replayed", 2): 1}
        if who == scene.hook:
            repetitions["killed", 1] = 1
        assert checker.repetitions() == repetitions, who
        assert checker.replayed() == {("replayed", 1), ("replayed", 2)}, who
        assert checker.contradictions() == [], who
        assert consumer.misnumbered == [], who
