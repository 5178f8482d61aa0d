"""Test `rooms status` with parts that are down, even where the service cannot answer."""

import re
from typing import Any, Final

import pytest

from rooms.api.readiness import PARTS
from rooms.cli.status import _ADVICE
from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen, problem

EVERY_PART: Final = (*PARTS, "relay", "broker", "magazines")
QUEUE: Final = {"due": 0, "claimed": 0, "later": 0, "oldest_seconds": 0}
BACKLOG: Final = {
    "push": QUEUE,
    "pull": QUEUE,
    "leased": 0,
    "abandoned": 0,
    "held": {},
    "sidelined": {},
}


def health(*down: str) -> dict[str, Any]:
    return {
        "status": "degraded" if down else "ready",
        "parts": {part: "down" if part in down else "up" for part in EVERY_PART},
        "degraded": list(down),
        "leader_absent_seconds": 0,
    }


def test_every_down_part_comes_with_advice(terminal: Terminal, fake: FakeRooms) -> None:
    body = {
        "at": "2026-01-31T12:00:00Z",
        "health": health("magazines", "broker"),
        "leader": "one",
        "backlog": BACKLOG,
        "subscriptions": [],
        "subscriptions_total": 0,
    }
    fake.interfere = lambda _: (200, body)
    result = terminal.run("status")
    assert result.exit_code == 0, result.output
    assert "magazines down" in result.stdout
    assert {
        line.partition(":")[0] for line in result.stderr.splitlines() if "start it" in line
    } == {
        "magazines",
        "broker",
    }


def test_what_was_not_counted_is_not_known(terminal: Terminal, fake: FakeRooms) -> None:
    """A zero would say that nothing waits, while the database is too busy to count."""
    unknown = {"due": None, "claimed": None, "later": None, "oldest_seconds": None}
    backlog: dict[str, Any] = {
        "push": {**unknown, "oldest_seconds": 300.0},
        "pull": unknown,
        "leased": None,
        "abandoned": None,
        "held": None,
        "sidelined": {"nacked": 2},
    }
    body = {
        "at": "2026-01-31T12:00:00Z",
        "health": health(),
        "leader": "one",
        "backlog": backlog,
        "subscriptions": [],
        "subscriptions_total": 0,
    }
    fake.interfere = lambda _: (200, body)
    result = terminal.run("status")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1] == (
        "PUSH due not known, the oldest for 5 min; PULL due not known; leased not known; "
        "held not known; 2 sidelined (2 nacked)"
    )
    assert "rooms_counts_refused" in result.stderr
    backlog |= BACKLOG
    assert "rooms_counts_refused" not in terminal.run("status").stderr


def test_it_asks_for_the_subscriptions_of_a_room_or_for_single_ones(
    terminal: Terminal, fake: FakeRooms
) -> None:
    body: dict[str, Any] = {
        "at": "2026-01-31T12:00:00Z",
        "health": health(),
        "leader": None,
        "backlog": BACKLOG,
        "subscriptions": [],
        "subscriptions_total": 0,
    }
    asked: list[dict[str, str]] = []
    ids = [f"01900000-0000-7000-8000-00000000000{n}" for n in (1, 2)]

    def answer(seen: Seen) -> Answer:
        if seen.path.endswith("/status"):
            asked.append(seen.query)
            return 200, body
        return 200, {"id": 7 if "/rooms/" in seen.path else seen.path[-36:]}

    fake.interfere = answer
    assert terminal.run("status", "--room", "7").exit_code == 0
    given = [part for one in ids for part in ("--subscription", one)]
    assert terminal.run("status", *given).exit_code == 0
    assert asked == [
        {"limit": "50", "room_id": "7"},
        {"limit": "50", "subscription_id": ",".join(ids)},
    ]
    refused = terminal.run("status", "--room", "7", "--subscription", ids[0])
    assert refused.exit_code == 2
    assert "either --room or --subscription" in refused.stderr


def test_those_of_one_endpoint_that_fail_alike_are_one_row(
    terminal: Terminal, fake: FakeRooms
) -> None:
    def failing(number: int) -> dict[str, Any]:
        is_refused = number % 2 == 0
        return {
            "subscription_id": f"{number}",
            "room": "orders",
            "name": f"s{number}",
            "condition": "failing",
            "since": f"2026-01-31T11:5{number}:00Z",
            "last_delivered_at": None,
            "due": 0,
            "retrying": 4,
            "waiting": 4,
            "held": {"circuit_open": 1},
            "sidelined": 2,
            "host": "crm.test",
            "authority": "crm.test:9001" if is_refused else "crm.test",
            "last_status": None if is_refused else 500,
            "last_error": "connect: refused" if is_refused else "status: busy",
            "together_with": [f"{other}" for other in range(8) if other != number],
        }

    body: dict[str, Any] = {
        "at": "2026-01-31T12:00:00Z",
        "health": health(),
        "leader": "one",
        "backlog": BACKLOG,
        "subscriptions": [failing(number) for number in range(8)],
        "subscriptions_total": 8,
    }
    fake.interfere = lambda _: (200, body)
    result = terminal.run("status")
    assert [line.split("  ")[0] for line in result.stdout.splitlines()[3:]] == [
        "subscription",
        "4 subscriptions",
        "",
        "4 subscriptions",
        "",
    ]
    rows = result.stdout.splitlines()[4:]
    assert rows[0].endswith("failing    10 min ago  -          16 retrying, 4 held, 8 sidelined")
    assert rows[1].strip() == (
        "crm.test:9001; connect: refused; orders/s0, orders/s2, orders/s4 and 1 more"
    )
    assert rows[3].strip() == ("crm.test; status: busy; orders/s1, orders/s3, orders/s5 and 1 more")
    assert "use --each" in result.stderr
    # One that still delivers a part is not said to fail as the others do.
    body["subscriptions"][6]["condition"] = "unsteady"
    mixed = terminal.run("status").stdout.splitlines()[4:]
    assert mixed[0].startswith("4 subscriptions  failing, unsteady  10 min ago")
    assert mixed[2].split()[:3] == ["4", "subscriptions", "failing"]
    each = terminal.run("status", "--each")
    assert "orders/s7" in each.stdout
    assert "--each" not in each.stderr
    assert terminal.json("status") == body


@pytest.mark.parametrize("part", EVERY_PART)
def test_no_part_is_without_advice(part: str) -> None:
    assert re.search(r"\bstart\b|\bcheck whether\b", _ADVICE[part])


@pytest.mark.parametrize("status", [200, 503])
def test_readiness_replaces_an_unavailable_status(
    terminal: Terminal, fake: FakeRooms, status: int
) -> None:
    def answer(seen: Seen) -> Answer | None:
        if seen.path == "/health/ready":
            return status, health("database")
        return problem(503, "Try again soon", "PostgreSQL is away")

    fake.interfere = answer
    result = terminal.run("status")
    assert result.exit_code == 1
    assert "database down" in result.stderr
    assert "database: PostgreSQL does not accept writes" in result.stderr
    assert "Try again soon (503)" in result.stderr


def test_a_service_of_another_kind_is_reported_as_it_answers(
    terminal: Terminal, fake: FakeRooms
) -> None:
    fake.interfere = lambda _: problem(503, "Try again soon", "no")
    result = terminal.run("status")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: Try again soon (503)")


def troubled(name: str, condition: str, **fields: Any) -> dict[str, Any]:
    """Return a subscription of `/v1/status` to the room `orders`."""
    return {
        "subscription_id": name,
        "room": "orders",
        "name": name,
        "type": "PUSH",
        "condition": condition,
        "since": "2026-01-31T11:55:00Z",
        "last_delivered_at": None,
        "due": 0,
        "retrying": 0,
        "waiting": 0,
        "held": {},
        "sidelined": 0,
        "host": None,
        "authority": None,
        "last_status": None,
        "last_error": None,
        "together_with": [],
        **fields,
    }


def remedies(terminal: Terminal, fake: FakeRooms, *subscriptions: dict[str, Any]) -> list[str]:
    body = {
        "at": "2026-01-31T12:00:00Z",
        "health": health(),
        "leader": "one",
        "backlog": BACKLOG,
        "subscriptions": subscriptions,
        "subscriptions_total": len(subscriptions),
    }
    fake.interfere = lambda _: (200, body)
    return terminal.run("status").stderr.splitlines()


def test_a_few_subscriptions_are_named_in_the_command_that_mends_them(
    terminal: Terminal, fake: FakeRooms
) -> None:
    few = [troubled(f"s {n}", "failing", sidelined=2) for n in range(2)]
    assert remedies(terminal, fake, *few) == [
        "sidelined: once the endpoint works, use `rooms sideline shovel 'orders/s 0' 'orders/s 1'`"
    ]
    many = [troubled(f"s{n}", "resting", sidelined=2) for n in range(4)]
    assert remedies(terminal, fake, *many) == [
        "sidelined: once the endpoint works, use `rooms sideline shovel ROOM/NAME...`"
    ]
    (note,) = remedies(terminal, fake, troubled("crm", "failing", retrying=3))
    assert "`rooms subscription retry orders/crm` does not wait for the next attempt" in note
    assert remedies(terminal, fake, troubled("crm", "paused", retrying=3)) == [
        "disabled, circuit open or paused: use `rooms subscription resume orders/crm`"
    ]
    (note,) = remedies(
        terminal, fake, *(troubled(name, "failing", retrying=3) for name in ("crm", "mail"))
    )
    assert "`rooms subscription retry orders/crm orders/mail`" in note


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (
            "PULL",
            "no consumer pulls, or they are too slow: `rooms subscription consumers orders/crm`",
        ),
        (
            "PUSH",
            "the endpoint is slow, or a limit is reached: see `rooms subscription lane orders/crm`",
        ),
    ],
)
def test_a_subscription_that_is_behind_comes_with_advice(
    terminal: Terminal, fake: FakeRooms, kind: str, remedy: str
) -> None:
    (note,) = remedies(terminal, fake, troubled("crm", "behind", type=kind, due=5))
    assert note.startswith(f"behind: {remedy}")
