"""Call webhooks that kill their worker: they are sidelined, and all others are delivered.

Workers are real processes, and are restarted when they die, as a supervisor would.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rooms.domain.state_machine import Reason
from tests.support.polling import until
from tests.support.process_group import Crew, Process, assembled
from tests.support.room import Hook, Place
from tests.support.service import ROOT, descendants
from tests.support.webhook_sink import HANG, Reply, Sink, sinking

POISONED = Path(__file__).parent / "poison"
SANDBOX_AFTER_CRASHES = 2
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
    environment = {
        "PYTHONPATH": f"{POISONED}{os.pathsep}{ROOT}",
        "ROOMS_SANDBOX_AFTER_CRASHES": str(SANDBOX_AFTER_CRASHES),
    }
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
        """Replace workers that die while waiting."""

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


def test_only_the_delivery_that_kills_its_workers_is_sidelined(crew: Crew, sink: Sink) -> None:
    """All of them are claimed together, and so lost together, each time. It dies of two workers, then of its wards."""
    place = Place.open(crew, sink)
    healthy, hanging = (
        place.push("healthy"),
        place.push("hanging", timeout_ms=1000, delivery_attempts=0),
    )
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
        shift.until(
            lambda hook=hook, end=end: states(crew, hook) == {end: MANY},  # type: ignore[misc]
            f"{hook.path} to be {end}",
        )
    assert shift.deaths == SANDBOX_AFTER_CRASHES
    errors = crew.rows(ERRORS, poison.id)
    assert [attempts for _, attempts in errors] == [1] * MANY
    assert all("SIGKILL" in error for error, _ in errors)
    logged = Counter(kind for (kind,) in crew.rows(LOGGED, poison.id))
    assert (logged["attempted"], logged["sidelined"]) == (MANY, MANY)
    assert sink.arrivals(poison.path) == []
    assert shift.worker.process.poll() is None


def test_deliveries_of_killed_workers_are_not_sidelined(crew: Crew, sink: Sink) -> None:
    """More kills than the sandbox needs, always during the same attempts: all are delivered."""
    place = Place.open(crew, sink)
    hook = place.push("slow", timeout_ms=30_000)
    sink.behave(hook.path, lambda _: HANG)
    for number in range(SLOTS):
        place.publish({"number": number})
    shift = Shift.begin(crew)
    for kills in range(1, SANDBOX_AFTER_CRASHES + 4):
        sink.wait(hook.path, SLOTS * kills)
        shift.kill()
    sink.wait(hook.path, SLOTS * (SANDBOX_AFTER_CRASHES + 4))
    assert len(descendants(shift.worker.process.pid)) > 1, (
        "nothing was attempted in a sandbox process"
    )
    sink.behave(hook.path, lambda _: Reply())
    shift.kill()
    shift.until(lambda: states(crew, hook) == {("delivered", None): SLOTS}, "all of them")
