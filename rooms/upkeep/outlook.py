"""What retention would do now, told without doing it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

import psycopg

from rooms.errors import StorageUnavailableError
from rooms.storage.engine import Connection, connection_for
from rooms.storage.patience import value
from rooms.storage.retention import Replacement, exported_below, weigh
from rooms.storage.spans import Span, parts_of, spans_of
from rooms.upkeep.retention import worth_while


class Fate(StrEnum):
    """What would become of a day."""

    GOES = "goes"
    """All of it."""
    SHRINKS = "shrinks"
    """To what must stay."""
    STAYS = "stays"
    """Too little of it would go."""
    WAITS = "waits"
    """Its log has not left for where it is exported to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """A day that is over, or remains of several (`kept`): how many deliveries it has, and how many of them must stay."""

    label: str
    kept: bool
    deliveries: int
    stay: int
    fate: Fate


async def outlook(url: str, *, days: int, destination: str | None) -> Sequence[Prospect]:
    """Everything that is over by `days` days, the oldest first; `destination`: where the log has to have left for. Counts
    each delivery of it, and locks nothing. StorageUnavailableError.
    """
    try:
        async with connection_for(url, name="rooms outlook") as connection:
            before = await value(connection, "SELECT now()") - timedelta(days=days)
            exported = None if destination is None else await exported_below(connection, destination)
            spans = spans_of(await parts_of(connection), int(before.timestamp() * 1000))
            return [await _prospect(connection, span, before, exported) for span in list(spans) if len(span.parts) == 1]
    except psycopg.OperationalError as exc:
        raise StorageUnavailableError(str(exc)) from exc


async def _prospect(connection: Connection, span: Span, before: datetime, exported: int | None) -> Prospect:
    (part,) = span.parts
    stay, deliveries = await weigh(connection, part, before)
    if not worth_while(stay, deliveries):
        fate = Fate.STAYS
    elif not await Replacement(connection, span, before=before, exported=exported).has_left():
        fate = Fate.WAITS
    else:
        fate = Fate.SHRINKS if stay else Fate.GOES
    return Prospect(label=part.label, kept=part.kept, deliveries=deliveries, stay=stay, fate=fate)
