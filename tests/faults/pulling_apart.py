"""A process that pulls and hangs between what it took and its answer: `pulling_apart.py URL KEY ORGANISATION QUEUE`."""

import asyncio
import sys
import time

from rooms.domain.ids import KeyId, OrganisationId
from rooms.domain.principal import Principal
from rooms.domain.states import Scope
from rooms.metrics import Metrics
from rooms.pulling import puller as module
from rooms.pulling.service import open_puller
from rooms.storage.leases import Row
from rooms.storage.signals import Signals


def hang(rows: list[Row]) -> bytes:
    """Instead of an answer."""
    sys.stdout.write(f"taken {len(rows)}\n")
    sys.stdout.flush()
    while True:
        time.sleep(60)


async def main(url: str, key: str, organisation: str, queue: str) -> None:
    """One pull."""
    principal = Principal(
        key_id=KeyId(key), organisation_id=OrganisationId(organisation), scopes=frozenset({Scope.SUBSCRIBE})
    )
    async with Signals(url) as signals, open_puller(url, signals=signals, metrics=Metrics()) as puller:
        await puller.pull(principal, queue, b'{"lease_ms": 1000}')


if __name__ == "__main__":
    setattr(module, "messages_json", hang)  # noqa: B010 - a fault made from outside
    asyncio.run(main(*sys.argv[1:]))
