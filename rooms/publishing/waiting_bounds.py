"""Bound the bytes of publishes that wait for a connection, and share them between organisations.

Above `MAX_WAITING_BYTES` PostgreSQL does not keep up, and each organisation has an equal part. One
message is a request of any size, and it cannot be divided. So it gets its turn, also while others
publish: up to half of its part may wait without it.

Parts shrink only as organisations arrive, so they bound no sum: two ceilings do.
"""

from typing import Final

MAX_WAITING_BYTES: Final = 128 * 1024 * 1024
"""Above it requests are refused; for each of the connections."""
MOST_WAITING_BYTES: Final = 2 * MAX_WAITING_BYTES
"""Above it an organisation has one request waiting, of at most an equal part.

It is compared with what waits already. So a large request finds a place as often as a small one.
"""
FULL_WAITING_BYTES: Final = 3 * MAX_WAITING_BYTES
"""A request that would exceed it is the only one of its organisation, and a small one."""
SMALL_REQUEST_BYTES: Final = 64 * 1024


def may_wait(size: int, own_bytes: int, all_bytes: int, organisations: int) -> bool:
    """Return whether a request of `size` bytes may wait, once too much does with it.

    `own_bytes` of its organisation and `all_bytes` wait already. `organisations` have something
    waiting then, with its own.
    """
    if own_bytes and all_bytes > MOST_WAITING_BYTES:
        return False
    share = MAX_WAITING_BYTES // organisations
    if own_bytes + size > share:
        return own_bytes <= share // 2 and all_bytes <= MOST_WAITING_BYTES
    is_small = not own_bytes and size <= SMALL_REQUEST_BYTES
    return is_small or all_bytes + size <= FULL_WAITING_BYTES
