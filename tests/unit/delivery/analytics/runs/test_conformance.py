"""Test that the automaton accepts exactly what the transition table allows."""

import numpy as np
import pytest

from delivery.analytics.runs.conformance import (
    ATTEMPT_SHIFT,
    CODES,
    EVENTS_BY_KIND,
    GENERATION_SHIFT,
    STEP_STARTS,
    is_legal,
    order_base,
)
from delivery.analytics.sealing.layout import SEGMENT_COLUMNS
from rooms.db.tables.messages import delivery_log
from rooms.domain.state_machine import Event, LogKind
from tests.support.random_walks import walk


def order_key(kind: LogKind, generation: int, attempt: int) -> int:
    """Return the key by which both engines sort the rows of a delivery, as their queries do."""
    return order_base(kind) | (generation << GENERATION_SHIFT) | (attempt << ATTEMPT_SHIFT)


def test_every_kind_and_every_event_is_mapped() -> None:
    assert set(EVENTS_BY_KIND) == set(LogKind)
    assert frozenset().union(*EVENTS_BY_KIND.values()) == set(Event)


def test_allowed_paths_are_legal_and_sort_in_order() -> None:
    rng = np.random.default_rng(3)
    for _ in range(500):
        path = walk(rng, steps=12)
        assert is_legal(CODES[kind] for kind, _, _ in path)
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
def test_other_paths_are_illegal(path: str) -> None:
    assert not is_legal(CODES[LogKind(kind)] for kind in path.split())


def test_attempts_and_unknown_kinds_change_no_state() -> None:
    result = "enqueued attempted attempted swept attempted delivered attempted"
    assert is_legal(CODES[LogKind(kind)] for kind in result.split())


def test_codes_fit_their_bits_and_starts_sort_first() -> None:
    assert max(CODES.values()) < 32
    latest = max(order_key(kind, 3, 5) for kind in STEP_STARTS)
    assert all(
        order_key(kind, 3, 5) > latest for kind in set(LogKind) - STEP_STARTS - {LogKind.PUBLISHED}
    )


def test_segments_have_every_log_column_but_responses() -> None:
    log = {column.name for column in delivery_log.columns}
    keys = {"message_hi", "message_lo", "delivery_hi", "delivery_lo"}
    joined = {"publisher_id", "publisher_organisation_id", "application", "worker_version"}
    columns = {column.name for column in SEGMENT_COLUMNS}
    assert columns == log - {"answer_head"} | keys | joined
