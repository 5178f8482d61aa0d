"""Test the names of subscriptions in the report, and its history beside a wrong clock."""

from collections.abc import Mapping
from datetime import timedelta

from delivery.analytics.report.data import (
    read_history,
    read_hourly_failures,
    read_subscription_names,
)
from delivery.analytics.report.live import Names
from rooms.domain.ids import IdGenerator, RoomId
from tests.support.report_tables import JOURNEYS, NOON, A, Tables, journey

ROOM = RoomId(17)


def labels(names: Mapping[str, Names | None]) -> list[str]:
    """Return the labels of subscriptions in a room that all have one host."""
    day = [
        {
            "subscription_id": one,
            "room_id": ROOM,
            "attempts": 1,
            "failures": 0,
            "target_host": "hooks.example",
        }
        for one in names
    ]
    tables = {"rollups_daily": day, "incidents": [], "cofailures": []}
    known = {one: name for one, name in names.items() if name is not None}
    found = read_subscription_names(
        lambda table: tables[table], lambda table, _: tables[table], known, None
    )
    return [found.label(one) for one in names]


def ids(count: int) -> list[str]:
    """Return ids of one room, made in one millisecond."""
    generator = IdGenerator(lambda _: 5)
    return [generator.generate(ROOM, 1_700_000_000_000) for _ in range(count)]


def test_a_name_that_no_other_has_is_the_label() -> None:
    first, second = ids(2)
    names = {first: Names(name="audit", room="orders"), second: Names(name="audit", room="bills")}
    assert labels(names) == ["orders/audit", "bills/audit"]


def test_namesakes_are_distinguished_by_their_organisations() -> None:
    first, second = ids(2)
    names: dict[str, Names | None] = {
        first: Names(name="audit", room="orders", organisation="Bank A"),
        second: Names(name="audit", room="orders", organisation="Bank B"),
    }
    assert labels(names) == ["orders/audit Bank A", "orders/audit Bank B"]


def test_subscriptions_of_one_room_and_moment_have_different_labels() -> None:
    """Their ids differ in the middle only."""
    named = dict.fromkeys(ids(3), Names(name="audit", room="orders", organisation="Bank A"))
    assert len(set(labels(named))) == 3
    unnamed = dict.fromkeys(ids(3))
    assert len(set(labels(unnamed))) == 3
    assert all(label.startswith("hooks.example …") for label in labels(unnamed))


_YEARS = timedelta(days=3653)


def test_a_clock_that_was_wrong_for_a_moment_stretches_no_history() -> None:
    wrong = [journey(sign * _YEARS.total_seconds(), "delivered", took_s=1) for sign in (1, -1)]
    tables = Tables({}, [*JOURNEYS, *wrong])
    now = NOON + timedelta(hours=1)
    found = read_history(lambda columns: tables.batches("journeys", columns), now)
    assert (found.step_s, found.total()) == (1, len(JOURNEYS))
    assert found.log_end is not None
    assert NOON < found.log_end <= now


def test_a_clock_that_was_wrong_for_a_moment_stretches_no_strip() -> None:
    hours = [{"hour": NOON + off, "subscription_id": A, "attempts": 5, "failures": 2}
        for off in (timedelta(), timedelta(hours=1), _YEARS, -_YEARS)]  # fmt: skip
    tables = Tables({"rollups_hourly": hours}, [])
    now = NOON + timedelta(hours=2)
    found = read_hourly_failures(
        lambda columns: tables.batches("rollups_hourly", columns), [A], now
    )
    assert found is not None
    assert (found.began, found.step_s) == (NOON, 3600)
    assert found.counts[A].tolist() == [[5, 5], [2, 2]]
