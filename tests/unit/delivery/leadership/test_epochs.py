"""Check that the epochs of holds only grow."""

from hypothesis import given
from hypothesis import strategies as st

from delivery.leadership.epochs import EPOCHS_PER_MS, next_epoch

NOW_MS = 1_800_000_000_000
YEARS_MS = 200 * 365 * 86_400_000


@given(st.lists(st.integers(NOW_MS, NOW_MS + YEARS_MS), min_size=2))
def test_epochs_grow_whatever_the_clock_says(times_ms: list[int]) -> None:
    last, given_epochs = 0, []
    for now_ms in times_ms:
        last = next_epoch(last, now_ms)
        given_epochs.append(last)
    assert given_epochs == sorted(set(given_epochs))
    assert last < 1 << 63


def test_a_store_without_memory_gives_a_later_epoch() -> None:
    """Take a million holds in a millisecond: one that another store gives later is higher."""
    last = next_epoch(0, NOW_MS) + EPOCHS_PER_MS - 1
    assert next_epoch(0, NOW_MS + 1) > last


def test_an_epoch_is_later_than_those_of_earlier_versions() -> None:
    """Versions before counted from 0, or in ZooKeeper from the creation of a node."""
    node_created_ms, transactions = NOW_MS - 10_000_000, (10_000 // 5) << 32
    assert next_epoch(17, NOW_MS) > node_created_ms * EPOCHS_PER_MS + transactions
