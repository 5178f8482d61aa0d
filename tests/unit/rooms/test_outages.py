"""One line when a part goes, one each minute, one when it is back; whichever callers notice, and however often."""

import logging
from collections.abc import Callable
from itertools import pairwise

import psycopg
import pytest
import sqlalchemy.exc
from hypothesis import given
from hypothesis import strategies as st

from rooms.errors import (
    BrokerUnavailableError,
    ElectionUnavailableError,
    MagazineUnavailableError,
    NotFoundError,
    StorageRefusedError,
    StorageUnavailableError,
)
from rooms.outages import (
    FLAPPING_S,
    OUTAGES,
    REMINDER_S,
    REQUESTS_REFUSED,
    STALE_S,
    Dependency,
    Outages,
    dependency_of,
)

AWAY = StorageUnavailableError("connection refused")
REFUSED = REQUESTS_REFUSED
UNSENT = "wake-ups failed"
Lines = Callable[[], list[str]]


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def outages(hand: Hand) -> Outages:
    return Outages(hand)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """Return a function that lists the messages logged so far."""
    return lambda: [record.getMessage() for record in caplog.records]


def test_an_outage_under_load_is_two_lines(outages: Outages, hand: Hand, lines: Lines) -> None:
    for _ in range(550):
        outages.record_failure(AWAY, REFUSED)
        hand.now += 0.1
    hand.now += 1
    outages.record_success(REFUSED, dependency=Dependency.POSTGRESQL)
    outages.record_success(REFUSED, dependency=Dependency.POSTGRESQL)
    assert lines() == [
        "PostgreSQL is away: connection refused",
        "PostgreSQL is back after 56 s; 550 requests were refused meanwhile",
    ]


def test_a_long_outage_is_recalled_each_minute(outages: Outages, hand: Hand, lines: Lines) -> None:
    for _ in range(150):
        outages.record_failure(AWAY, REFUSED)
        hand.now += 1
    outages.record_success(REFUSED)
    assert lines() == [
        "PostgreSQL is away: connection refused",
        f"PostgreSQL has been away for {REMINDER_S:.0f} s; 61 requests were refused: connection refused",
        f"PostgreSQL has been away for {2 * REMINDER_S:.0f} s; 121 requests were refused: connection refused",
        "PostgreSQL is back after 150 s; 150 requests were refused meanwhile",
    ]


def test_several_callers_share_the_lines(outages: Outages, hand: Hand, lines: Lines) -> None:
    """The part is back when the last of them has succeeded."""
    outages.record_failure(AWAY, REFUSED)
    outages.record_failure(AWAY, UNSENT, count=3)
    hand.now += 2
    outages.record_success(REFUSED, dependency=Dependency.POSTGRESQL)
    assert len(lines()) == 1
    outages.record_success(UNSENT)
    assert lines() == [
        "PostgreSQL is away: connection refused",
        "PostgreSQL is back after 2 s; 3 wake-ups failed, 1 requests were refused meanwhile",
    ]


def test_what_is_not_tried_any_more_keeps_no_part_away(
    outages: Outages, hand: Hand, lines: Lines
) -> None:
    outages.record_failure(AWAY, UNSENT)
    hand.now += STALE_S + 1
    outages.record_failure(AWAY, REFUSED)
    outages.record_success(REFUSED, dependency=Dependency.POSTGRESQL)
    assert lines() == [
        "PostgreSQL is away: connection refused",
        "PostgreSQL is back after 11 s; 1 wake-ups failed, 1 requests were refused meanwhile",
    ]
    assert not outages.any_failing


def test_any_caller_that_goes_on_ends_what_is_not_tried_any_more(
    outages: Outages, hand: Hand, lines: Lines
) -> None:
    """One that had succeeded before, too: it goes on saying so."""
    outages.record_failure(AWAY, UNSENT)
    outages.record_failure(AWAY, REFUSED)
    outages.record_success(REFUSED)
    hand.now += STALE_S - 1
    outages.record_success(REFUSED)
    outages.record_success("another thing failed")
    assert len(lines()) == 1
    hand.now += 1
    outages.record_success(REFUSED)
    assert len(lines()) == 2


def test_a_part_that_comes_and_goes_fills_no_log(
    outages: Outages, hand: Hand, lines: Lines
) -> None:
    """A statement that is refused now and then, with others that succeed between."""
    for _ in range(int(FLAPPING_S) * 100):
        outages.record_failure(AWAY, REFUSED)
        hand.now += 0.01
        outages.record_success(REFUSED)
    hand.now += 0.01
    outages.record_failure(AWAY, REFUSED)
    outages.record_success(REFUSED)
    assert lines() == [
        "PostgreSQL is away: connection refused",
        "PostgreSQL is back after 0 s; 1 requests were refused meanwhile",
        "PostgreSQL is away: connection refused",
        f"PostgreSQL is back after 0 s; {int(FLAPPING_S) * 100:,} requests were refused meanwhile",
    ]


def test_a_second_outage_that_lasts_gets_its_line(
    outages: Outages, hand: Hand, lines: Lines
) -> None:
    outages.record_failure(AWAY, REFUSED)
    outages.record_success(REFUSED)
    hand.now += 5
    while hand.now < 1000 + FLAPPING_S + 1:
        outages.record_failure(AWAY, REFUSED)
        hand.now += 1
    hand.now += 3
    outages.record_success(REFUSED)
    assert repr(lines()).count("is away") == 2
    assert repr(lines()).count("is back after 29 s; 26 requests") == 1


def test_what_refuses_is_not_called_away(outages: Outages, lines: Lines) -> None:
    outages.record_failure(StorageRefusedError("no space left on device"), REFUSED)
    assert lines() == ["PostgreSQL takes no work right now: no space left on device"]


def test_an_answer_that_is_final_is_no_outage(outages: Outages, lines: Lines) -> None:
    outages.record_failure(NotFoundError("no such subscription"), REFUSED)
    assert lines() == ["requests were refused: no such subscription"]
    assert not outages.any_failing


def test_an_answer_ends_refusals_and_nothing_that_is_still_tried(
    outages: Outages, hand: Hand, lines: Lines
) -> None:
    outages.record_failure(AWAY, REFUSED)
    outages.record_failure(AWAY, UNSENT)
    outages.record_answer(Dependency.BROKER)
    outages.record_answer(Dependency.POSTGRESQL)
    assert outages.any_failing
    hand.now += 1
    outages.record_success(UNSENT)
    assert lines()[1:] == [
        "PostgreSQL is back after 1 s; 1 requests were refused, 1 wake-ups failed meanwhile"
    ]


def test_answers_between_end_nothing_that_is_tried_each_quarter_of_a_minute(
    outages: Outages, hand: Hand, lines: Lines
) -> None:
    for _ in range(4):
        outages.record_failure(AWAY, UNSENT)
        hand.now += 15
        outages.record_answer(Dependency.POSTGRESQL)
    outages.record_success(UNSENT)
    assert lines() == [
        "PostgreSQL is away: connection refused",
        "PostgreSQL is back after 60 s; 4 wake-ups failed meanwhile",
    ]


def test_parts_go_and_come_back_by_themselves(outages: Outages, hand: Hand, lines: Lines) -> None:
    outages.record_failure(BrokerUnavailableError("reset"), REFUSED)
    outages.record_failure(AWAY, REFUSED)
    hand.now += 1
    outages.record_success(REFUSED, dependency=Dependency.POSTGRESQL)
    outages.record_success(REFUSED, dependency=Dependency.BROKER)
    assert not outages.any_failing
    assert lines() == [
        "The broker is away: reset",
        "PostgreSQL is away: connection refused",
        "PostgreSQL is back after 1 s; 1 requests were refused meanwhile",
        "The broker is back after 1 s; 1 requests were refused meanwhile",
    ]


def test_many_consequences_make_no_long_line(outages: Outages, lines: Lines) -> None:
    for number in range(100):
        outages.record_failure(AWAY, f"runs of {number} failed", count=number + 1)
    for number in range(100):
        outages.record_success(f"runs of {number} failed")
    assert repr(lines()).count("runs of") == 3
    assert "4,753 more failures meanwhile" in repr(lines())


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (StorageRefusedError("x"), Dependency.POSTGRESQL),
        (psycopg.OperationalError("x"), Dependency.POSTGRESQL),
        (sqlalchemy.exc.OperationalError("x", None, Exception()), Dependency.POSTGRESQL),
        (BrokerUnavailableError("x"), Dependency.BROKER),
        (ElectionUnavailableError("x"), Dependency.ELECTION),
        (MagazineUnavailableError("x"), Dependency.MAGAZINES),
        (TimeoutError(), Dependency.POSTGRESQL),
    ],
)
def test_the_part_is_named_by_the_error(error: Exception, part: Dependency) -> None:
    assert dependency_of(error) is part


@pytest.mark.parametrize(
    "kind", [BrokerUnavailableError, ElectionUnavailableError, MagazineUnavailableError]
)
@pytest.mark.parametrize(
    "cause", [psycopg.OperationalError("gone"), StorageUnavailableError("gone")]
)
def test_postgresql_is_named_where_it_is_the_store(kind: type[Exception], cause: Exception) -> None:
    error = kind("gone")
    error.__cause__ = cause
    assert dependency_of(error) is Dependency.POSTGRESQL


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.sampled_from([AWAY, BrokerUnavailableError("x"), StorageRefusedError("y")]),
            st.sampled_from("abc"),
            st.floats(0, 90),
        ),
        max_size=60,
    )
)
def test_lines_come_in_pairs_and_seldom(steps: list[tuple[bool, Exception, str, float]]) -> None:
    """For one dependency, an outage ends before the next begins, and both lines are rare."""
    hand, found = Hand(), list[tuple[float, str]]()
    outages = Outages(hand)
    handler = logging.Handler()
    handler.emit = lambda record: found.append((hand.now, record.getMessage()))  # type: ignore[method-assign]
    log = logging.getLogger("rooms.outages")
    log.addHandler(handler)
    try:
        for fails, error, consequence, later in steps:
            hand.now += later
            if fails:
                outages.record_failure(error, consequence)
            else:
                outages.record_success(consequence)
    finally:
        log.removeHandler(handler)
    for name in ("PostgreSQL", "The broker"):
        mine = [(at, line) for at, line in found if line.startswith(name)]
        kinds = [
            "end" if " is back " in line else "more" if " has been " in line else "begin"
            for _, line in mine
        ]
        edges = [kind for kind in kinds if kind != "more"]
        assert edges == (["begin", "end"] * len(edges))[: len(edges)]
        begins = [at for (at, _), kind in zip(mine, kinds, strict=True) if kind == "begin"]
        assert all(later - at >= FLAPPING_S for at, later in pairwise(begins))


def test_the_processs_own_begins_each_test_anew() -> None:
    assert not OUTAGES.any_failing
