"""Queue requests of organisations that take turns, and form the groups that are committed.

The requests of one organisation do not fill the groups that another waits for: each has one request
a turn, and its own stay in the order of their arrival.
"""

import logging
from collections import deque
from collections.abc import Collection, KeysView
from itertools import islice
from typing import Final

from rooms.db.publish.request_rows import InsertRows
from rooms.domain.ids import OrganisationId, RoomId
from rooms.publishing.commit_outcomes import CommitOutcome, Settle

_log = logging.getLogger(__name__)

MAX_ROWS: Final = 2_000
"""A group has at most so many messages and deliveries, or one request of any size."""
MAX_BYTES: Final = 4 * 1024 * 1024
"""A group has at most so many bytes, or one request of any size."""
_OVERHEAD_BYTES: Final = 1024
"""A request takes about so many bytes beside payloads, and so does each message or delivery."""


class PendingRequest:
    """Hold a request until its outcome is known. `size`: the bytes that it takes meanwhile."""

    __slots__ = ("_settle", "is_settled", "size", "submission")

    def __init__(self, submission: InsertRows, settle: Settle) -> None:
        self.submission = submission
        self.is_settled = False
        self.size = submission.payload_bytes + _OVERHEAD_BYTES * (1 + submission.row_count)
        self._settle = settle

    def settle(self, outcome: CommitOutcome | Exception) -> None:
        """Report the outcome once. An error of the callee must not look like one of the commit."""
        if self.is_settled:
            return
        self.is_settled = True
        try:
            self._settle(outcome)
        except Exception:  # noqa: BLE001 - the others of the group are answered all the same
            _log.exception("the outcome of a publish could not be reported")


class _OrganisationQueue(deque[PendingRequest]):
    """Queue the requests of one organisation."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0


class RequestQueues:
    """Hold the requests that wait, by organisation. It is true while any does."""

    def __init__(self) -> None:
        self._queues: dict[OrganisationId | None, _OrganisationQueue] = {}
        """In the order of their turns; none is empty."""
        self._last_alone: OrganisationId | None = None
        """The organisation that the last group of a room was of."""
        self.count = 0

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def organisations(self) -> KeysView[OrganisationId | None]:
        """Return whose requests wait."""
        return self._queues.keys()

    def bytes_of(self, organisation: OrganisationId | None) -> int:
        """Return the bytes of an organisation's requests."""
        queue = self._queues.get(organisation)
        return 0 if queue is None else queue.bytes

    def add(self, one: PendingRequest) -> None:
        """Queue a request behind those of its organisation."""
        queue = self._queues.get(one.submission.organisation)
        if queue is None:
            queue = self._queues[one.submission.organisation] = _OrganisationQueue()
        queue.append(one)
        queue.bytes += one.size
        self.count += 1

    def take_group(self, most_rows: int) -> list[PendingRequest]:
        """Take the next group: organisations in turn, the requests of each in order of arrival."""
        group: list[PendingRequest] = []
        rows = size = 0
        queues = self._queues
        while queues:
            organisation, queue = next(iter(queues.items()))
            one = queue[0]
            row_count = one.submission.row_count
            if group and (rows + row_count > most_rows or size + one.size > MAX_BYTES):
                break
            queue.popleft()
            if not queue:
                del queues[organisation]
            elif len(queues) > 1:
                queues[organisation] = queues.pop(organisation)
            queue.bytes -= one.size
            group.append(one)
            rows += row_count
            size += one.size
        self.count -= len(group)
        return group

    def take_group_of_a_room(self, most_rows: int) -> list[PendingRequest]:
        """Take the next group, of one organisation and of the room of its first request.

        It is of another organisation than the last one, where another has requests.
        """
        if not self._queues:
            return []
        first, *others = islice(self._queues, 2)
        organisation = others[0] if others and first == self._last_alone else first
        self._last_alone = organisation
        group: list[PendingRequest] = []
        rest = _OrganisationQueue()
        rows = size = 0
        is_full = False
        for one in self._queues.pop(organisation):
            if not is_full and (not group or one.submission.room_id == group[0].submission.room_id):
                rows += one.submission.row_count
                size += one.size
                is_full = bool(group) and (rows > most_rows or size > MAX_BYTES)
                if not is_full:
                    group.append(one)
                    continue
            rest.append(one)
            rest.bytes += one.size
        if rest:
            self._queues[organisation] = rest
        self.count -= len(group)
        return group

    def take_locking(self, rooms: Collection[RoomId]) -> list[PendingRequest]:
        """Take the requests of these rooms that take locks, those of each organisation in order."""
        taken: list[PendingRequest] = []
        for organisation, queue in list(self._queues.items()):
            rest = _OrganisationQueue()
            for one in queue:
                if one.submission.room_id in rooms and one.submission.takes_locks:
                    taken.append(one)
                else:
                    rest.append(one)
                    rest.bytes += one.size
            if rest:
                self._queues[organisation] = rest
            else:
                del self._queues[organisation]
        self.count -= len(taken)
        return taken
