"""Bound what a batch costs in its room, which depends on the subscribers, not on the request."""

from collections.abc import Iterable
from typing import Final

from rooms.errors import TooLargeError

MAX_BATCH_DELIVERIES: Final = 100_000
"""Most deliveries of a batch, unless one message has more: it cannot be divided.

They are rows of one statement, and take about as much memory as all requests that may wait.
"""


class BatchTooCostlyError(TooLargeError):
    """Report a batch that makes too much work in its room, and may succeed in parts."""


def check_deliveries(recipients: Iterable[int]) -> None:
    """Raise BatchTooCostlyError if messages with so many recipients each make too many deliveries.

    A single message is never refused.
    """
    total = largest = 0
    for count in recipients:
        total += count
        largest = max(largest, count)
    if total > max(MAX_BATCH_DELIVERIES, largest):
        raise BatchTooCostlyError(
            f"messages: they make {total} deliveries, and a batch makes at most"
            f" {MAX_BATCH_DELIVERIES}; publish fewer messages at a time"
        )
