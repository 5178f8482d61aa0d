"""Test the commands for sidelines, magazines and status: their requests and output."""

import re
from collections.abc import Callable

import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen
from tests.support.sleep_recorder import recorded_pauses

SHOVEL = "/v1/subscriptions/[^/]+/sideline/shovel"
PURGE = "/v1/subscriptions/[^/]+/sideline/purge"
DELIVERY = "01900000-0000-7000-8000-0000000000aa"
ITEM = {
    "delivery_id": DELIVERY,
    "reason": "attempts_exhausted",
    "attempts": 4,
    "shovel_count": 0,
    "last_status": 503,
    "last_error": "status: busy",
    "sidelined_at": "2026-01-01T00:00:00Z",
}
WOULD = {
    "would_move": 2,
    "by_reason": {"attempts_exhausted": 2},
    "sample": [ITEM],
    "too_often": 3,
    "expired": 0,
    "until": "2026-01-31T03:00:00Z",
}
MAGAZINE = {
    "name": "subscription-x_SIDELINE",
    "depth": 1,
    "expected": 2,
    "oldest_at": "2026-01-01T00:00:00Z",
    "shards": [
        dict.fromkeys(
            (
                "shard",
                "load_pointer",
                "fire_pointer",
                "sweep_pointer",
                "loaded",
                "fired",
                "deleted",
                "reloaded",
                "epoch",
            ),
            7,
        )
    ],
}
STATUS = {
    "at": "2026-01-31T03:00:00Z",
    "health": {
        "status": "degraded",
        "parts": {"database": "up", "worker": "down", "leader": "up"},
        "leader_absent_seconds": 0,
    },
    "leader": "upkeep-1",
    "backlog": {
        "push": {"due": 7, "claimed": 0, "later": 2, "oldest_seconds": 300.4},
        "pull": {"due": 0, "claimed": 0, "later": 0, "oldest_seconds": 0.0},
        "leased": 1,
        "abandoned": 0,
        "held": {"circuit_open": 5, "paused": 0},
        "sidelined": {},
    },
    "subscriptions": [
        {
            "subscription_id": "1",
            "room": "orders",
            "name": "crm",
            "condition": "circuit_open",
            "since": "2026-01-31T00:00:00Z",
            "last_delivered_at": "2026-01-30T23:59:00Z",
            "due": 0,
            "retrying": 2,
            "waiting": 2,
            "held": {"circuit_open": 5},
            "sidelined": 3,
            "host": "crm.test",
            "last_status": 503,
            "last_error": "status: busy",
            "together_with": ["2"],
        },
        {
            "subscription_id": "2",
            "room": "orders",
            "name": "erp",
            "condition": "failing",
            "since": "2026-01-31T02:59:30Z",
            "last_delivered_at": None,
            "due": 0,
            "retrying": 1,
            "waiting": 1,
            "held": {},
            "sidelined": 0,
            "host": "crm.test",
            "last_status": None,
            "last_error": "refused",
            "together_with": ["1"],
        },
    ],
    "subscriptions_total": 3,
}


def interfere(fake: FakeRooms) -> Callable[[Seen], Answer | None]:
    """Answer the routes of these tests."""
    job = {"job_id": fake.identity(8), "kind": "shovel_sideline", "state": "queued"}

    def answer(seen: Seen) -> Answer | None:
        match seen.method, seen.path.rsplit("/", 1)[-1]:
            case "GET", "sideline":
                return 200, {"items": [ITEM], "next_cursor": None}
            case "POST", "shovel" | "purge":
                return (200, WOULD) if (seen.body or {}).get("dry_run") else (202, job)
            case "POST", "sweep":
                return 202, job
            case "GET", "magazines":
                return 200, {"items": [MAGAZINE], "next_cursor": None}
            case "GET", "status":
                return 200, STATUS
            case "GET", name if name.endswith("_SIDELINE"):
                return 200, dict(MAGAZINE)
        return None

    return answer


@pytest.fixture(autouse=True)
def crm(fake: FakeRooms) -> str:
    fake.rooms.append({"id": 1000, "name": "orders"})
    fake.subscriptions.append(
        {"id": fake.identity(1), "name": "crm", "type": "PUSH", "status": "active"}
    )
    fake.jobs.extend(
        {"id": fake.identity(8), "state": state, "done": 1, "total": 2}
        for state in ("running", "done")
    )
    fake.interfere = interfere(fake)
    return fake.identity(1)


def test_sideline_is_listed_with_filters(terminal: Terminal, fake: FakeRooms, crm: str) -> None:
    shown = terminal.done(
        "sideline",
        "list",
        "orders/crm",
        "--reason",
        "nacked",
        "--error",
        "busy",
        "--since",
        "2026-01-01",
    )
    assert "attempts_exhausted" in shown
    assert DELIVERY in shown
    (seen,) = fake.sent("GET", f"/v1/subscriptions/{crm}/sideline")
    assert seen.query == {"reason": "nacked", "error": "busy", "since": "2026-01-01", "limit": "50"}
    assert terminal.run("sideline", "list", "orders/crm", "--reason", "bored").exit_code == 2


def test_sideline_is_summarised(terminal: Terminal, fake: FakeRooms, crm: str) -> None:
    reported = terminal.json("sideline", "show", crm)
    assert [(seen.query, seen.body) for seen in fake.sent("POST", PURGE)] == [
        ({}, {"dry_run": True})
    ]
    assert reported["sidelined"] == 2
    assert reported["by_reason"] == {"attempts_exhausted": 2}
    assert reported["oldest_sidelined_at"] == "2026-01-01T00:00:00Z"


def test_shovel_takes_filters_and_a_rate(terminal: Terminal, fake: FakeRooms, crm: str) -> None:
    options = [
        "--rate",
        "50",
        "--concurrency",
        "2",
        "--max-shovels",
        "7",
        "--event-type",
        "paid",
        "--until",
        "2026-02-01",
    ]
    options += ["--correlation-id", "a", "--correlation-id", "b", "--delivery-id", DELIVERY]
    options += ["--ordering-key", "o", "--business-key", "b 1", "--business-key", "b 2"]
    assert terminal.json("sideline", "shovel", crm, *options)["state"] == "running"
    assert fake.sent("POST", SHOVEL)[0].body == {
        "rate_per_s": 50.0,
        "concurrency": 2,
        "max_shovels": 7,
        "event_type": "paid",
        "until": "2026-02-01",
        "correlation_ids": ["a", "b"],
        "ordering_keys": ["o"],
        "business_keys": ["b 1", "b 2"],
        "delivery_ids": [DELIVERY],
    }
    assert terminal.run("sideline", "shovel", crm, "--rate", "0").exit_code == 2
    assert terminal.run("sideline", "shovel", crm, "--delivery-id", "x").exit_code == 2


def test_a_shovel_is_followed_to_its_end(
    terminal: Terminal, crm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = recorded_pauses(monkeypatch, "rooms.cli.job")
    assert terminal.json("sideline", "shovel", crm, "--follow")["state"] == "done"
    assert len(pauses) == 1


def test_a_shovel_that_failed_is_an_error(terminal: Terminal, fake: FakeRooms, crm: str) -> None:
    fake.jobs.clear()
    fake.jobs.append({"id": fake.identity(8), "state": "failed", "error": "disk full"})
    result = terminal.run("sideline", "shovel", crm, "--follow")
    assert result.exit_code == 1
    assert "disk full" in result.stderr


def test_a_dry_run_shows_what_would_move(terminal: Terminal, fake: FakeRooms, crm: str) -> None:
    shown = terminal.done("sideline", "shovel", crm, "--dry-run", "--reason", "nacked")
    assert "2 deliveries would be queued" in shown
    assert "3 were shoveled too often and would stay" in shown
    assert "expired" not in shown
    assert fake.sent("POST", SHOVEL)[0].body == {"reason": "nacked", "dry_run": True}
    assert "2 deliveries would be deleted" in terminal.done("sideline", "purge", crm, "--dry-run")
    assert terminal.json("sideline", "purge", crm, "--dry-run") == WOULD
    assert [seen.body for seen in fake.sent("POST", PURGE)] == [{"dry_run": True}] * 2


def test_a_purge_asks_first(terminal: Terminal, fake: FakeRooms, crm: str) -> None:
    refused = terminal.run("sideline", "purge", crm, stdin="n\n")
    assert refused.exit_code == 1
    assert "Delete 2 deliveries in the sideline of 'crm'?" in refused.stderr
    assert terminal.run("sideline", "purge", crm, "--confirm", "cmr").exit_code == 1
    assert [seen.query for seen in fake.sent("POST", PURGE)] == [{}, {}]
    terminal.done("sideline", "purge", crm, "--reason", "orphan", stdin="y\n")
    terminal.done("sideline", "purge", crm, "--confirm", "crm")
    asked = [(seen.query, seen.body) for seen in fake.sent("POST", PURGE) if seen.query]
    # What is sidelined while the question is open stays.
    bound = {"until": WOULD["until"]}
    assert asked == [
        ({"confirm": "crm"}, {"reason": "orphan"} | bound),
        ({"confirm": "crm"}, bound),
    ]


def test_magazines(terminal: Terminal, fake: FakeRooms) -> None:
    assert "subscription-x_SIDELINE" in terminal.done("magazine", "list")
    shown = terminal.done("magazine", "show", "subscription-x_SIDELINE")
    assert "sweep pointer" in shown
    assert terminal.json("magazine", "show", "subscription-x_SIDELINE") == MAGAZINE
    assert terminal.json("magazine", "sweep", "subscription-x_SIDELINE")["state"] == "running"
    assert len(fake.sent("POST", "/v1/magazines/subscription-x_SIDELINE/sweep")) == 1


def test_status_shows_health_backlog_and_subscriptions(terminal: Terminal) -> None:
    result = terminal.run("status")
    assert result.exit_code == 0
    parts, backlog, _, heading, crm, why, erp, _ = result.stdout.splitlines()
    assert parts == "degraded: database up, worker down; upkeep-1 leads"
    assert (
        backlog == "PUSH 7 due, the oldest for 5 min, 2 later; PULL 0 due; 1 leased; "
        "5 held (5 circuit_open); 0 sidelined"
    )
    assert heading.split() == ["subscription", "condition", "since", "delivered", "waits"]
    assert crm.split("  ")[0] == "orders/crm"
    assert crm.endswith("circuit open  3 h ago   3 h ago    2 retrying, 5 held, 3 sidelined")
    assert why == "    crm.test; status: busy; together with orders/erp"
    assert erp.split()[:6] == ["orders/erp", "failing", "30", "s", "ago", "-"]
    assert "2 of 3; use --limit to show more" in result.stderr
    assert "rooms subscription resume" in result.stderr
    assert "rooms sideline shovel" in result.stderr
    assert terminal.json("status") == STATUS


def test_status_of_a_healthy_installation(terminal: Terminal, fake: FakeRooms) -> None:
    backlog = {**STATUS["backlog"], "abandoned": 3}  # type: ignore[dict-item]
    health = {**STATUS["health"], "parts": {"database": "up", "worker": "up", "leader": "down"}}  # type: ignore[dict-item]
    well = {
        **STATUS,
        "health": health,
        "backlog": backlog,
        "subscriptions": [],
        "subscriptions_total": 0,
        "leader": None,
    }
    fake.interfere = lambda seen: (200, well) if seen.path == "/v1/status" else None
    result = terminal.run("status", "--limit", "1")
    assert fake.sent("GET", "/v1/status")[-1].query == {"limit": "1"}
    assert "no leader for 0 s" in result.stdout
    assert "; 3 crashed their worker repeatedly (`rooms doctor` names them); " in result.stdout
    assert result.stderr.endswith("every subscription is healthy\n")
    # A key without the scope platform gets no name of a host.
    well["health"] = {**STATUS["health"], "parts": {"leader": "up"}}  # type: ignore[dict-item]
    assert "; there is a leader" in terminal.run("status").stdout


def test_schedule_is_set_shown_and_removed(terminal: Terminal, fake: FakeRooms, crm: str) -> None:
    reported = {"interval_s": 60, "rate_per_s": 5.0, "next_at": "2026-01-01T00:00:00Z"}
    before = fake.interfere
    fake.interfere = lambda seen: (
        (200, reported) if seen.path.endswith("/sideline/schedule") else before(seen)
    )
    assert terminal.json("sideline", "schedule", crm, "--every", "60", "--rate", "5") == reported
    assert terminal.json("sideline", "schedule", crm) == reported
    terminal.done("sideline", "schedule", crm, "--off")
    asked = [
        (seen.method, seen.body)
        for seen in fake.requests
        if seen.path.endswith("/sideline/schedule")
    ]
    assert asked == [
        ("PUT", {"interval_s": 60, "rate_per_s": 5.0}),
        ("GET", None),
        ("DELETE", None),
    ]
    assert terminal.run("sideline", "schedule", crm, "--rate", "5").exit_code == 2
    assert terminal.run("sideline", "schedule", crm, "--every", "60", "--off").exit_code == 2


def job(fake: FakeRooms, state: str, **fields: object) -> dict[str, object]:
    return {"id": fake.identity(8), "state": state, "done": 1, "total": 2, **fields}


def two(fake: FakeRooms) -> tuple[str, str]:
    """Return the ids of `orders/crm` and of another subscription, `orders/erp`."""
    fake.subscriptions.append(
        {"id": fake.identity(2), "name": "erp", "type": "PUSH", "status": "active"}
    )
    return fake.identity(1), fake.identity(2)


def test_several_sidelines_are_shoveled_by_one_command(
    terminal: Terminal, fake: FakeRooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage of one host fills the sidelines of all subscriptions that go there."""
    recorded_pauses(monkeypatch, "rooms.cli.job")
    ids = two(fake)
    fake.jobs.extend(job(fake, "done") for _ in range(3))
    given = ("sideline", "shovel", "orders/crm", "orders/erp", "--rate", "5", "--follow")
    result = terminal.run(*given)
    assert result.exit_code == 0, result.output
    assert [seen.path.split("/")[3] for seen in fake.sent("POST", SHOVEL)] == [*ids]
    assert {seen.body["rate_per_s"] for seen in fake.sent("POST", SHOVEL)} == {5.0}
    for name in ("orders/crm", "orders/erp"):
        assert f"progress of {name}: rooms job {fake.identity(8)} --follow" in result.stderr
        assert re.search(rf"^{name} +{fake.identity(8)} +done\b", result.stdout, re.MULTILINE)
    reported = terminal.json(*given)
    assert [one["subscription"] for one in reported["items"]] == ["orders/crm", "orders/erp"]


def test_a_name_twice_is_one_sideline(terminal: Terminal, fake: FakeRooms) -> None:
    terminal.done("sideline", "shovel", "orders/crm", "orders/crm")
    assert len(fake.sent("POST", SHOVEL)) == 1


def test_a_wrong_name_among_several_moves_nothing(terminal: Terminal, fake: FakeRooms) -> None:
    result = terminal.run("sideline", "shovel", "orders/crm", "orders/cmr")
    assert result.exit_code == 1
    assert "no subscription 'cmr'" in result.stderr
    assert fake.sent("POST", SHOVEL) == []


def test_one_of_several_shovels_that_failed_is_an_error(
    terminal: Terminal, fake: FakeRooms
) -> None:
    two(fake)
    fake.jobs.clear()
    fake.jobs.extend([job(fake, "failed", error="disk full"), job(fake, "done")])
    result = terminal.run("sideline", "shovel", "orders/crm", "orders/erp", "--follow")
    assert result.exit_code == 1
    assert "disk full" in result.stderr
    assert "orders/erp" in result.stdout


def test_a_dry_run_of_several_sidelines_is_a_row_each(terminal: Terminal, fake: FakeRooms) -> None:
    two(fake)
    given = ("sideline", "shovel", "orders/crm", "orders/erp", "--dry-run")
    shown = terminal.done(*given)
    assert re.findall(r"^(orders/\w+) +2 +3 +0 ", shown, re.MULTILINE) == [
        "orders/crm",
        "orders/erp",
    ]
    assert terminal.json(*given)["items"][1] == {"subscription": "orders/erp", **WOULD}
