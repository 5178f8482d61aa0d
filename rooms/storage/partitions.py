"""The days that messages, deliveries and their log are cut into."""

from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import Connection, text

from rooms.domain.ids import first_id

DAYS_AHEAD: Final = 7
# A day only grows, and its updates clean up after themselves (HOT): vacuum and analyze come seldom, or they cost a
# fifth of everything that PostgreSQL does.
_SELDOM: Final = (
    "autovacuum_vacuum_insert_scale_factor = 0.5, autovacuum_vacuum_insert_threshold = 2000000, "
    "autovacuum_vacuum_scale_factor = 0.5, autovacuum_vacuum_threshold = 500000, "
    "autovacuum_analyze_scale_factor = 0.5, autovacuum_analyze_threshold = 200000"
)
STORAGE: Final = {
    "messages": f"WITH ({_SELDOM})",
    "deliveries": f"WITH (fillfactor = 50, {_SELDOM})",
    "delivery_log": f"WITH ({_SELDOM})",
}


def ensure_partitions(connection: Connection, now: datetime, days_ahead: int = DAYS_AHEAD) -> int:
    """Make the partitions from today to `days_ahead` days on; returns how many were new.

    A day whose rows already fell into the default partition cannot be made any more: it stays there, whole.
    """
    made = 0
    today = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    existing = set(connection.scalars(text("SELECT relname FROM pg_class WHERE relispartition")))
    for day in (today + timedelta(days=ahead) for ahead in range(days_ahead + 1)):
        low, high = (first_id(int(at.timestamp() * 1000)) for at in (day, day + timedelta(days=1)))
        for table, storage in STORAGE.items():
            name = f"{table}_{day:%Y%m%d}"
            if name in existing:
                continue
            key = "message_id" if table == "delivery_log" else "id"
            strays = connection.scalar(
                text(f"SELECT EXISTS (SELECT FROM {table}_rest WHERE {key} >= '{low}' AND {key} < '{high}')")  # noqa: S608 - names and ids of our own
            )
            if strays:
                continue
            connection.execute(
                text(f"CREATE TABLE {name} PARTITION OF {table} FOR VALUES FROM ('{low}') TO ('{high}') {storage}")
            )
            made += 1
    return made
