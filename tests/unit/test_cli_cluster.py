"""`rooms cluster`: who leads, and who does what."""

from typing import Any

import msgspec
import pytest

from rooms.errors import ElectionUnavailableError
from rooms.rest.problems import problem_of
from tests.fake_rooms import Answer, FakeRooms, Seen
from tests.terminal import Terminal

pytestmark = pytest.mark.row("B7")


def member(name: str, *partitions: str, leads: bool = False) -> dict[str, Any]:
    return {
        "name": name,
        "host": "h",
        "pid": 7,
        "since": "2026-01-31T12:00:00Z",
        "leads": leads,
        "partitions": list(partitions),
    }


def given(fake: FakeRooms, **cluster: Any) -> dict[str, Any]:
    body = {"leader": None, "epoch": 0, "leader_absent_seconds": 0.0, "members": [], **cluster}

    def answer(seen: Seen) -> Answer | None:
        return (200, body) if (seen.method, seen.path) == ("GET", "/v1/cluster") else None

    fake.interfere = answer
    return body


def test_members_are_a_table_and_the_leader_a_line(terminal: Terminal, fake: FakeRooms) -> None:
    body = given(
        fake,
        leader="one",
        epoch=17,
        members=[member("one", "upkeep/jobs", "upkeep/leases", leads=True), member("two")],
    )
    lines = terminal.done("cluster").splitlines()
    assert lines[0].split() == ["member", "host", "pid", "since", "leads", "does"]
    assert lines[2].split() == ["one", "h", "7", "2026-01-31T12:00:00Z", "yes", "upkeep/jobs,", "upkeep/leases"]
    assert lines[3].split()[-1] == "no"
    assert lines[-1] == "one leads, epoch 17"
    assert terminal.json("cluster") == body


def test_a_store_that_is_away_is_named_with_what_to_do(terminal: Terminal, fake: FakeRooms) -> None:
    error = ElectionUnavailableError("10.0.0.1:2181 refused")
    problem, _ = problem_of(error, "/v1/cluster")
    fake.interfere = lambda _: (503, msgspec.to_builtins(problem))
    result = terminal.run("cluster")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the store of the election (ELECTION_URL, else PostgreSQL) does not answer" in result.stderr
    assert "Start it" in result.stderr
    assert "10.0.0.1" not in result.stderr


def test_nobody_leads(terminal: Terminal, fake: FakeRooms) -> None:
    given(fake, leader_absent_seconds=61.4)
    result = terminal.run("cluster")
    assert result.exit_code == 0
    assert "nobody takes part" in result.stderr
    assert result.stdout.splitlines() == ["nobody has led for 61 s"]
