"""After an installation got another broker, or gave it up: what the former one was to carry goes this one's way."""

import logging
from typing import Final, Protocol

from rooms.domain.ids import SubscriptionId
from rooms.ports import Clock
from rooms.storage.changeover import START, may_stand_elsewhere, move_over, nothing_stands_elsewhere
from rooms.storage.writer import Writer
from rooms.upkeep.duty import GoOn

_log = logging.getLogger(__name__)

BATCH: Final = 1000
LONGEST_S: Final = 600.0
"""Between two looks, where nothing was found for long. A walk over a million rows costs a second or two of CPU, so there
is none where nothing can stand elsewhere.
"""


class Bell(Protocol):
    """Wakes whoever takes up queued work: PUSH work, or that of one PULL subscription."""

    def __call__(self, subscription: SubscriptionId | None = None, /) -> None: ...


class Changeover:
    """Looks for such work when its turn begins, and then after 1, 2, 4, … seconds: processes of the former shape may
    live on for a while and leave more. The writer's shape says what belongs where.
    """

    name = "the change of brokers"

    def __init__(self, writer: Writer, ring: Bell, clock: Clock) -> None:
        self._writer = writer
        self._ring = ring
        self._clock = clock
        self._pause_s = 0.0
        self._next_s = 0.0

    async def run(self, go_on: GoOn) -> None:
        """Move everything that nobody has, if it is time to look."""
        if self._clock.monotonic() < self._next_s:
            return
        moved = left = 0
        if await may_stand_elsewhere(self._writer):
            after = START
            while True:
                if not go_on():
                    return
                step = await move_over(self._writer, after, limit=BATCH)
                moved, left = moved + step.moved, left + step.left
                if step.moved:
                    self._ring()
                    for subscription in step.pulls:
                        self._ring(subscription)
                # What others publish behind it is of this shape, and does not keep the walk going.
                if step.last is None or step.end:
                    break
                after = step.last
            if not moved and not left:
                await nothing_stands_elsewhere(self._writer)
        if moved:
            _log.warning("the broker is another one than before: %d deliveries go its way now", moved)
        self._pause_s = 1.0 if moved or left else min(LONGEST_S, max(1.0, self._pause_s * 2))
        self._next_s = self._clock.monotonic() + self._pause_s
