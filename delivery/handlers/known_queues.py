"""Know every handler queue of the installation, and read only those that changed."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.db.catalog.handler_queues import QueueVersion, list_versions, read_queues
from rooms.db.connection import autocommit
from rooms.domain.handler_queue import HandlerQueue
from rooms.domain.ids import OrganisationId

_PAGE: Final = 1_000


class KnownQueues:
    """Hold the queues as they were read last, by their name in the store."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._known: dict[str, HandlerQueue] = {}

    async def refresh(self) -> Sequence[HandlerQueue]:
        """Return the queues of all organisations that are not being deleted.

        The tasks ask each second, and organisations may have many queues. So the settings are read
        only of those that are new or changed.
        """
        found: dict[str, HandlerQueue] = {}
        after = ""
        async with autocommit(self._engine) as connection:
            while True:
                page = await list_versions(connection, after=after, limit=_PAGE)
                changed = []
                for version in page:
                    queue = self._known.get(version.name)
                    if queue is not None and version == QueueVersion.of(queue):
                        found[version.name] = queue
                    else:
                        changed.append(version.name)
                if changed:
                    read = await read_queues(connection, changed)
                    found |= {queue.store_name: queue for queue in read}
                if len(page) < _PAGE:
                    break
                after = page[-1].name
        self._known = found
        return list(found.values())


def in_turns(queues: Iterable[HandlerQueue]) -> list[HandlerQueue]:
    """Return the first queue of each organisation, then the second of each, and so on."""
    counts: Counter[OrganisationId] = Counter()
    ranked: list[tuple[int, HandlerQueue]] = []
    for queue in queues:
        ranked.append((counts[queue.organisation_id], queue))
        counts[queue.organisation_id] += 1
    ranked.sort(key=lambda one: one[0])
    return [queue for _, queue in ranked]
