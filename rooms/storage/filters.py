"""What lists of messages and deliveries may be narrowed to."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement

from rooms.domain.ids import first_id
from rooms.domain.states import State
from rooms.storage.tables.messages import messages

_LAST_MS: Final = (1 << 48) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """None: whatever it is. `since` inclusive, `until` exclusive, by the time that the id tells."""

    since: datetime | None = None
    until: datetime | None = None
    event_type: str | None = None
    version: int | None = None
    state: State | None = None
    correlation_id: str | None = None
    business_key: str | None = None

    def of_ids(self, column: ColumnElement[str]) -> list[ColumnElement[bool]]:
        """The times, as bounds on ids: they choose partitions, and walk the primary key."""
        bounds: list[ColumnElement[bool]] = []
        if self.since is not None:
            bounds.append(column >= first_id(_ms(self.since)))
        if self.until is not None:
            bounds.append(column < first_id(_ms(self.until)))
        return bounds

    def of_messages(self) -> list[ColumnElement[bool]]:
        """What is asked of the message."""
        wanted: list[tuple[ColumnElement[Any], Any]] = [
            (messages.c.event_type, self.event_type),
            (messages.c.event_version, self.version),
            (messages.c.correlation_id, self.correlation_id),
            (messages.c.business_key, self.business_key),
        ]
        return [column == value for column, value in wanted if value is not None]


def _ms(at: datetime) -> int:
    # Rounded up: an id knows whole milliseconds only, and what was made before `at` must not be found.
    return min(max(-int(-at.timestamp() * 1000 // 1), 0), _LAST_MS)
