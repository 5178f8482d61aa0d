"""What retention would do, for whoever asks: by the settings that the upkeep has, straight on the database."""

import asyncio
from collections.abc import Sequence

from rooms.composition.upkeep import exports_of
from rooms.metrics import Metrics
from rooms.settings import Settings
from rooms.upkeep.outlook import Prospect, outlook


def prospects(settings: Settings, database_url: str, *, days: int | None = None) -> Sequence[Prospect]:
    """What is over by `days` days (None: those of the settings), and what would become of it now. Nothing, where everything
    is kept. StorageUnavailableError.
    """
    days = settings.retention_days if days is None else days
    if not days:
        return ()
    _, destination = exports_of(settings, database_url, Metrics())
    return asyncio.run(outlook(database_url, days=days, destination=destination))
