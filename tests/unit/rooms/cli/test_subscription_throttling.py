"""Test throttling options: the requests that they become, for subscriptions and rooms."""

import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import FakeRooms

OPTIONS = {
    "max_concurrency": 4,
    "timeout_ms": 5000,
    "rate_per_s": 12.5,
    "rate_burst": 3,
    "circuit_failures": 5,
    "circuit_window_ms": 20_000,
    "circuit_open_ms": 1500,
    "drain_per_s": 40.0,
    "disable_after_ms": 86_400_000,
}


@pytest.fixture(autouse=True)
def orders(fake: FakeRooms) -> None:
    fake.rooms.append({"id": 1000, "name": "orders"})
    fake.subscriptions.append(
        {"id": fake.identity(1), "name": "crm", "type": "PUSH", "status": "active"}
    )


def arguments() -> list[str]:
    return [
        word
        for name, value in OPTIONS.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def test_subscription_create_and_update_take_every_option(
    terminal: Terminal, fake: FakeRooms
) -> None:
    terminal.done(
        "subscription", "create", "orders", "new", "--push-url", "http://x.test/", *arguments()
    )
    made = fake.sent("POST", ".*/subscriptions")[0].body
    assert {name: made[name] for name in OPTIONS} == OPTIONS
    terminal.done("subscription", "update", "orders/crm", *arguments())
    assert fake.sent("PATCH", ".*")[0].body == OPTIONS


def test_room_takes_them_as_defaults_and_an_operational_url(
    terminal: Terminal, fake: FakeRooms
) -> None:
    terminal.done("room", "update", "orders", *arguments(), "--operational-url", "http://ops.test/")
    assert fake.sent("PATCH", ".*")[0].body == {**OPTIONS, "operational_url": "http://ops.test/"}
    terminal.done("room", "create", "bills", "--rate-per-s", "5")
    assert fake.sent("POST", "/v1/rooms")[0].body["rate_per_s"] == 5.0
    assert "circuit_failures" not in fake.sent("POST", "/v1/rooms")[0].body


@pytest.mark.parametrize("name", OPTIONS)
def test_each_can_be_cleared(terminal: Terminal, fake: FakeRooms, name: str) -> None:
    option = name.replace("_", "-")
    terminal.done("subscription", "update", "orders/crm", "--clear", option)
    terminal.done("room", "update", "orders", "--clear", option)
    assert [seen.body for seen in fake.sent("PATCH", ".*")] == [{name: None}] * 2


def test_zero_disables_the_default_of_the_room(terminal: Terminal, fake: FakeRooms) -> None:
    terminal.done(
        "subscription", "update", "orders/crm", "--circuit-failures", "0", "--rate-per-s", "0"
    )
    assert fake.sent("PATCH", ".*")[0].body == {"circuit_failures": 0, "rate_per_s": 0.0}


def test_a_lane_is_shown(terminal: Terminal, fake: FakeRooms) -> None:
    fake.interfere = lambda seen: (
        (200, {"circuit": {"state": "open"}}) if seen.path.endswith("/lane") else None
    )
    assert terminal.json("subscription", "lane", "orders/crm") == {"circuit": {"state": "open"}}
    assert fake.sent("GET", f"/v1/subscriptions/{fake.identity(1)}/lane")


def test_ordered_is_set_for_a_room_a_subscription_or_neither(
    terminal: Terminal, fake: FakeRooms
) -> None:
    terminal.done("room", "update", "orders", "--ordered")
    terminal.done("subscription", "update", "orders/crm", "--not-ordered")
    terminal.done("subscription", "update", "orders/crm", "--clear", "ordered")
    assert [seen.body for seen in fake.sent("PATCH", ".*")] == [
        {"ordered": said} for said in (True, False, None)
    ]
