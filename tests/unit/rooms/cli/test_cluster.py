"""Test `rooms cluster`: the members, the leader and their tasks."""

from typing import Any

import msgspec

from rooms.api.errors import to_problem
from rooms.errors import ElectionUnavailableError
from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen


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
    assert lines[2].split() == [
        "one",
        "h",
        "7",
        "2026-01-31T12:00:00Z",
        "yes",
        "upkeep/jobs,",
        "upkeep/leases",
    ]
    assert lines[3].split()[-1] == "no"
    assert lines[-1] == "one leads, epoch 17"
    assert terminal.json("cluster") == body


def test_unreachable_election_store_is_reported_with_advice(
    terminal: Terminal, fake: FakeRooms
) -> None:
    error = ElectionUnavailableError("10.0.0.1:2181 refused")
    problem, _ = to_problem(error, "/v1/cluster")
    fake.interfere = lambda _: (503, msgspec.to_builtins(problem))
    result = terminal.run("cluster")
    assert (result.exit_code, result.stdout) == (1, "")
    assert (
        "the store of the election (ELECTION_URL, else PostgreSQL) does not answer" in result.stderr
    )
    assert "Start it" in result.stderr
    assert "10.0.0.1" not in result.stderr


def test_no_leader(terminal: Terminal, fake: FakeRooms) -> None:
    given(fake, leader_absent_seconds=61.4)
    result = terminal.run("cluster")
    assert result.exit_code == 0
    assert "no members" in result.stderr
    assert result.stdout.splitlines() == ["no leader for 61 s"]
