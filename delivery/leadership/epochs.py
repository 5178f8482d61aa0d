"""Number holds so that epochs of every store, and of each of its restored copies, are comparable.

Magazines remember the highest epoch that swept a shard, and refuse a lower one for ever. So an
epoch must be higher than all before it, also after the election moved to another store, or its
store was restored from a backup or lost its data. An epoch therefore begins with the time of the
hold, by the clock of the store. Where that clock was set back, it is the last epoch plus one.
"""

from typing import Final

EPOCHS_PER_MS: Final = 1 << 20
"""Epochs of one millisecond. A higher count of milliseconds always has the higher epoch.

They reach int8 until the year 2248.
"""


def next_epoch(last: int, now_ms: int) -> int:
    """Return the epoch of a hold that is taken at `now_ms` after one of epoch `last`."""
    return max(last + 1, now_ms * EPOCHS_PER_MS)
