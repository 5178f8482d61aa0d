"""Choose the connection that commits a request, so that locks of keys delay no other room.

A request with an Idempotency-Key, with a caller's id, or with a delivery that keeps an order waits
in PostgreSQL for any other one with the same key, until that is committed. In a group all others
would wait with it. So those that take such locks have a connection of their own, as have large
ones, and neither waits for a lock for long: what waited in vain goes to a further connection, for a
while together with all in its room that takes locks. Only there do requests wait for each other,
a room at a time, and organisations take turns.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from rooms.db.publish.request_rows import InsertRows
from rooms.domain.ids import RoomId
from rooms.publishing.group_commit import GroupCommitter, is_large

CONTENDED_S: Final = 10.0
"""So long after a request waited in vain for a lock, the room's requests with locks wait apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committers:
    """Hold the committers of a process. For one thread.

    `plain`: small requests that take no lock of a key; `keyed`: those that do; `large`: all others;
    `contended`: those that waited in vain for a lock.
    """

    plain: GroupCommitter
    keyed: GroupCommitter
    large: GroupCommitter
    contended: GroupCommitter
    monotonic: Callable[[], float]
    _contended_until: dict[RoomId, float] = field(default_factory=dict)

    def choose(self, rows: InsertRows) -> GroupCommitter:
        """Return the committer of a request."""
        if self._contended_until and rows.takes_locks and self._is_contended(rows.room_id):
            return self.contended
        if is_large(rows):
            return self.large
        return self.keyed if rows.takes_locks else self.plain

    def choose_for_contended(self, room: RoomId) -> GroupCommitter:
        """Return the committer for requests of a room that waited in vain for a lock."""
        now = self.monotonic()
        for known in list(self._contended_until):
            if not self._is_contended(known):
                del self._contended_until[known]
        self._contended_until[room] = now + CONTENDED_S
        return self.contended

    def _is_contended(self, room: RoomId) -> bool:
        until = self._contended_until.get(room)
        if until is None:
            return False
        # A later request must not overtake those of its key that still wait there.
        return self.monotonic() < until or self.contended.has_work_in(room)
