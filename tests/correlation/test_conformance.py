"""The automaton says what the transition table says, and nothing else."""

import numpy as np
import pytest

from delivery.correlation.columns import SEGMENT
from delivery.correlation.conformance import CODES, REPORTS, STARTS, legal, order_key
from rooms.domain.states import Event, LogKind
from rooms.storage.tables.messages import delivery_log
from tests.correlation.walks import walk


def test_every_kind_and_every_event_is_told_of() -> None:
    assert set(REPORTS) == set(LogKind)
    assert frozenset().union(*REPORTS.values()) == set(Event)


def test_whatever_the_table_allows_is_legal_and_sorts_into_its_order() -> None:
    rng = np.random.default_rng(3)
    for _ in range(500):
        path = walk(rng, steps=12)
        assert legal(kind for kind, _, _ in path)
        keys = [order_key(*step) for step in path]
        assert sorted(keys) == keys, path


@pytest.mark.parametrize(
    "path",
    [
        "delivered",
        "enqueued enqueued",
        "enqueued delivered delivered",
        "enqueued pull_acked",
        "enqueued attempted sidelined retry_scheduled",
        "enqueued leased leased",
        "enqueued attempted dropped delivered",
        "enqueued held sidelined",
        "enqueued attempted delivered purged",
    ],
)
def test_what_it_does_not_allow_is_illegal(path: str) -> None:
    assert not legal(LogKind(kind) for kind in path.split())


def test_attempts_and_unknown_notes_move_nothing() -> None:
    told = "enqueued attempted attempted swept attempted delivered attempted"
    assert legal(LogKind(kind) for kind in told.split())


def test_codes_fit_their_bits_and_starts_come_first_in_a_step() -> None:
    assert max(CODES.values()) < 32
    latest = max(order_key(kind, 3, 5) for kind in STARTS)
    assert all(order_key(kind, 3, 5) > latest for kind in set(LogKind) - STARTS - {LogKind.PUBLISHED})


def test_segments_have_every_column_of_the_log_but_the_answers() -> None:
    log = {column.name for column in delivery_log.columns}
    keys = {"message_hi", "message_lo", "delivery_hi", "delivery_lo"}
    assert {column.name for column in SEGMENT} == log - {"answer_head"} | keys
