"""Webhooks that kill whoever calls them: the guilty one ends in its sideline, and everybody else is delivered.

Real processes: workers that die and are started again, as their supervisor would.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rooms.domain.states import Reason
from tests.faults.crew import Crew, Process, assembled
from tests.place import Hook, Place
from tests.service import ROOT, descendants
from tests.sink import HANG, Reply, Sink, sinking
from tests.waiting import until

POISONED = Path(__file__).parent / "poison"
ISOLATE_AFTER = 2
MANY = 6
SLOTS = 4
"""So many calls at a time a lane begins with."""
STATES = "SELECT state::text, reason, count(*)::int FROM deliveries WHERE subscription_id = %s::uuid GROUP BY 1, 2"
ERRORS = "SELECT last_error, attempts FROM deliveries WHERE subscription_id = %s::uuid"
LOGGED = "SELECT kind::text FROM delivery_log WHERE subscription_id = %s::uuid ORDER BY writer_id, writer_seq"


@pytest.fixture
def sink() -> Iterator[Sink]:
    with sinking() as sink:
        yield sink


@pytest.fixture
def crew(tmp_path: Path, database: str) -> Iterator[Crew]:
    environment = {"PYTHONPATH": f"{POISONED}{os.pathsep}{ROOT}", "ROOMS_ISOLATE_AFTER": str(ISOLATE_AFTER)}
    with assembled(tmp_path, database, environment=environment) as (crew, _):
        yield crew


@dataclass
class Shift:
    """One worker after another."""

    crew: Crew
    worker: Process
    deaths: int = 0

    @classmethod
    def begin(cls, crew: Crew) -> "Shift":
        return cls(crew, crew.start("worker"))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Whoever dies meanwhile is replaced."""

        def looked() -> bool:
            if self.worker.process.poll() is not None:
                self.replace()
            return condition()

        until(looked, f"{what}, after {self.deaths} deaths")

    def replace(self) -> None:
        self.deaths += 1
        self.worker = self.crew.start("worker")

    def kill(self) -> None:
        self.worker.kill()
        self.replace()


def states(crew: Crew, hook: Hook) -> dict[tuple[str, str | None], int]:
    return {(state, reason): count for state, reason, count in crew.rows(STATES, hook.id)}


def test_a_copy_that_kills_its_workers_is_sidelined_and_it_alone(crew: Crew, sink: Sink) -> None:
    """All of them are claimed together, and so lost together, each time. It dies of two workers, then of its wards."""
    place = Place.open(crew, sink)
    healthy, hanging = place.push("healthy"), place.push("hanging", timeout_ms=1000, delivery_attempts=0)
    poison = place.push("poison")
    sink.behave(hanging.path, lambda _: HANG)
    for number in range(MANY):
        place.publish({"number": number})
    shift = Shift.begin(crew)
    ends = {
        poison: ("sidelined", Reason.STUCK),
        healthy: ("delivered", None),
        hanging: ("sidelined", Reason.ATTEMPTS_EXHAUSTED),
    }
    for hook, end in ends.items():
        shift.until(lambda hook=hook, end=end: states(crew, hook) == {end: MANY}, f"{hook.path} to be {end}")  # type: ignore[misc]
    assert shift.deaths == ISOLATE_AFTER
    errors = crew.rows(ERRORS, poison.id)
    assert [attempts for _, attempts in errors] == [1] * MANY
    assert all("SIGKILL" in error for error, _ in errors)
    logged = Counter(kind for (kind,) in crew.rows(LOGGED, poison.id))
    assert (logged["attempted"], logged["sidelined"]) == (MANY, MANY)
    assert sink.arrivals(poison.path) == []
    assert shift.worker.process.poll() is None


def test_workers_that_are_killed_make_nobody_guilty(crew: Crew, sink: Sink) -> None:
    """More often than copies are trusted, always in the middle of the same attempts: they are delivered in the end."""
    place = Place.open(crew, sink)
    hook = place.push("slow", timeout_ms=30_000)
    sink.behave(hook.path, lambda _: HANG)
    for number in range(SLOTS):
        place.publish({"number": number})
    shift = Shift.begin(crew)
    for kills in range(1, ISOLATE_AFTER + 4):
        sink.wait(hook.path, SLOTS * kills)
        shift.kill()
    sink.wait(hook.path, SLOTS * (ISOLATE_AFTER + 4))
    assert len(descendants(shift.worker.process.pid)) > 1, "nothing was attempted in a process of its own"
    sink.behave(hook.path, lambda _: Reply())
    shift.kill()
    shift.until(lambda: states(crew, hook) == {("delivered", None): SLOTS}, "all of them")
