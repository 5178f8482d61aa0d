"""Find leases of streams that ended, or were settled by another process.

Organisations take turns: a batch of each at a time, and among its streams, too. So a stream that
waits for credit learns of its leases beside any number of leases of others.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from delivery.pull.requests import Lease
from delivery.pull.stream import Stream
from delivery.pull.target import PullTarget
from rooms.db.leases.release import LeaseQueries
from rooms.domain.ids import OrganisationId
from rooms.errors import TransientError
from rooms.outages import OUTAGES

_log = logging.getLogger(__name__)

INSPECTION_INTERVAL_S: Final = 1.0
MAX_INSPECTION_INTERVAL_S: Final = 10.0
MAX_INSPECTED: Final = 1000
"""The most leases in one statement."""
_INSPECTION_SHARE: Final = 10
"""After a turn there is a pause of so many times its length."""
_INSPECTION_OUTAGE: Final = "looks for leases of streams that are over failed"


class _LeaseBatch(NamedTuple):
    """Hold leases, and the streams of which these are the last ones."""

    leases: list[tuple[PullTarget, Lease]]
    inspected: list[Stream]


class LeaseInspection:
    """Inspect the leases of the streams that need it, in turns of organisations."""

    def __init__(
        self,
        lease_store: LeaseQueries,
        streams: Collection[Stream],
        forget: Callable[[PullTarget, Sequence[Lease]], None],
    ) -> None:
        """Inspect `streams`, which the caller changes; `forget` gets leases that are over."""
        self._lease_store = lease_store
        self._streams = streams
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._queues: dict[OrganisationId, deque[tuple[Stream, Iterator[Lease]]]] = {}
        self._queued: set[Stream] = set()

    async def run_forever(self, has_streams: asyncio.Event) -> None:
        """Inspect while there are streams; at most once a second each, with pauses."""
        next_look_s = self._loop.time() + INSPECTION_INTERVAL_S
        pause_s = INSPECTION_INTERVAL_S
        while True:
            if not has_streams.is_set():
                self._drop_closed_streams()
                await has_streams.wait()
            await asyncio.sleep(pause_s)
            begun_s = self._loop.time()
            if begun_s >= next_look_s or not self._queues:
                self._look_for_streams()
                next_look_s = begun_s + INSPECTION_INTERVAL_S
            least_s = 0.0
            try:
                await self._take_turn()
            except TransientError as exc:
                OUTAGES.record_failure(exc, _INSPECTION_OUTAGE)
                least_s = INSPECTION_INTERVAL_S
            except Exception as exc:  # noqa: BLE001 - the next inspection may succeed
                _log.warning("an inspection of leases of streams failed, retrying: %s", exc)
                least_s = INSPECTION_INTERVAL_S
            else:
                OUTAGES.record_success(_INSPECTION_OUTAGE)
            now_s = self._loop.time()
            if not self._queues:
                least_s = max(least_s, next_look_s - now_s)
            pause_s = min(
                MAX_INSPECTION_INTERVAL_S, max(least_s, _INSPECTION_SHARE * (now_s - begun_s))
            )

    def _drop_closed_streams(self) -> None:
        for organisation, queue in list(self._queues.items()):
            kept = deque(entry for entry in queue if entry[0] in self._streams)
            if kept:
                self._queues[organisation] = kept
            else:
                del self._queues[organisation]
        self._queued = {stream for queue in self._queues.values() for stream, _ in queue}

    def _look_for_streams(self) -> None:
        self._drop_closed_streams()
        for stream in self._streams:
            if stream.needs_inspection and stream not in self._queued:
                self._queued.add(stream)
                queue = self._queues.setdefault(stream.targets[0].organisation, deque())
                queue.append((stream, _leases_of(stream)))

    async def _take_turn(self) -> None:
        """Inspect up to a statement's leases of each organisation; small ones share it."""
        batch = _LeaseBatch([], [])
        for organisation in list(self._queues):
            self._fill(batch, organisation)
            if len(batch.leases) >= MAX_INSPECTED:
                await self._inspect(batch)
                batch = _LeaseBatch([], [])
        await self._inspect(batch)

    def _fill(self, batch: _LeaseBatch, organisation: OrganisationId) -> None:
        # To the end at once: if its statement fails, the next turn begins with others.
        queue = self._queues.pop(organisation)
        room = MAX_INSPECTED - len(batch.leases)
        while queue and room:
            stream, leases = queue.popleft()
            taken = list(islice(leases, room))
            batch.leases.extend(
                (key, lease) for lease in taken if (key := stream.unsettled.get(lease)) is not None
            )
            if len(taken) == room:
                queue.append((stream, leases))
            else:
                self._queued.discard(stream)
                batch.inspected.append(stream)
            room -= len(taken)
        if queue:
            self._queues[organisation] = queue

    async def _inspect(self, batch: _LeaseBatch) -> None:
        if batch.leases:
            await self._forget_ended(batch.leases)
        for stream in batch.inspected:
            stream.on_inspected()

    async def _forget_ended(self, leases: Sequence[tuple[PullTarget, Lease]]) -> None:
        found = await self._lease_store.inspect(
            [(key.room, key.subscription, delivery) for key, (delivery, _) in leases]
        )
        ended: dict[PullTarget, list[Lease]] = {}
        for index, (key, lease) in enumerate(leases):
            delivery = found.get(index)
            if (
                delivery is None
                or not delivery.leased
                or delivery.generation != int.from_bytes(lease[1], "big")
            ):
                ended.setdefault(key, []).append(lease)
        for key, own in ended.items():
            self._forget(key, own)


def _leases_of(stream: Stream) -> Iterator[Lease]:
    """Yield the leases that it has at first; meanwhile some of them are settled."""
    yield from tuple(stream.unsettled)
