"""Looking at what waits in a queue, in its order, and at what comes then; nothing of it is taken."""

from collections.abc import Callable, Sequence
from typing import Final

from rooms.pulling.answer import browsed_json
from rooms.pulling.queue import Wish, refusal
from rooms.pulling.sifter import Cursor
from rooms.storage.sift import Found, sift
from rooms.storage.writer import Writer

BEHIND_US: Final = 5_000_000
"""What was published so long ago may become visible only now."""
MOST_SEEN: Final = 20_000


class Browser:
    """One reader of one queue. It sees each message once, and once more for every time that it comes again."""

    def __init__(self, writer: Writer, wish: Wish, now_s: Callable[[], float]) -> None:
        self._writer = writer
        self._wish = wish
        self._now_s = now_s
        self._cursor = Cursor(behind_us=BEHIND_US, again=False)
        self._seen: dict[tuple[str, int], None] = {}

    async def look(self) -> tuple[Sequence[bytes], bool]:
        """What was not seen yet, as JSON, and whether there may be more right now. NotFoundError, ConflictError."""
        key, selector = self._wish.queue, self._wish.selector
        self._cursor.begin(self._now_s())
        types = frozenset[str]() if selector is None else selector.event_types
        window = await sift(self._writer, (key.room, key.subscription, key.organisation), types, self._cursor.lows)
        if (error := refusal(window.standing, key)) is not None:
            raise error
        self._cursor.saw(window.found, whole=window.whole, at_us=window.at_us, now_s=self._now_s())
        return [browsed_json(found) for found in window.found if self._is_new(found)], not window.whole

    def _is_new(self, found: Found) -> bool:
        step = (found.delivery, found.generation)
        if found.event_type is None or found.payload is None or step in self._seen:
            return False
        selector = self._wish.selector
        if selector is not None and not selector.takes(found.event_type, found.headers, found.payload):
            return False
        self._seen[step] = None
        if len(self._seen) > MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        return True
