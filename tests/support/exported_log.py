"""A log written by hand, and the segments that were made of it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.dataset as ds

from rooms.db.connection import psycopg_url
from rooms.domain.ids import IdGenerator, RoomId

ROOM = RoomId(7)
_INSERT = """
INSERT INTO log_entries (room_id, message_id, writer_id, writer_seq, kind, subscription_id, delivery_id, generation,
    attempt, delay_ms, latency_ms, http_status, correlation_id, event_type, error_class, detail, ts)
VALUES (%s, %s, %s, %s, 'attempted', %s, %s, 0, 1, 250, 1.5, %s, %s, %s, %s, %s, %s)
"""
# What a text may hold that would end a field, a line or a value of a CSV that was read carelessly.
TEXTS = ("plain", "", 'quote " and, comma', "two\nlines", "cr\r\n", "\\.", "\\N", "ä😀", None)


@dataclass(slots=True)
class LogWriter:
    """A writer of the log on a connection of its own, which begins and ends its transactions itself."""

    connection: psycopg.Connection[Any]
    id: int
    ids: IdGenerator
    seq: int = 0

    def write(
        self, rows: int = 1, *, born: datetime | None = None, at: datetime | None = None
    ) -> None:
        """So many rows about messages born then, in the transaction under way."""
        now = datetime.now(UTC)
        born_ms = int((born or now).timestamp() * 1000)
        written = []
        for _ in range(rows):
            self.seq += 1
            text = TEXTS[self.seq % len(TEXTS)]
            message, subscription, delivery = (self.ids.generate(ROOM, born_ms) for _ in range(3))
            values = (
                ROOM,
                message,
                self.id,
                self.seq,
                subscription,
                delivery if self.seq % 2 else None,
            )
            written.append((*values, 503 if text else None, text, text, text, text, at or now))
        self.connection.cursor().executemany(_INSERT, written)

    def commit(self) -> None:
        self.connection.commit()


@contextmanager
def writer(url: str, number: int) -> Iterator[LogWriter]:
    """A writer with this id, which is on record."""
    with psycopg.connect(psycopg_url(url)) as connection:
        connection.execute(
            "INSERT INTO writers (id, kind, host, pid) OVERRIDING SYSTEM VALUE VALUES (%s, 'worker', 'h', 1)",
            (number,),
        )
        connection.commit()
        yield LogWriter(connection, number, IdGenerator(lambda _: number << 30))


def written(url: str) -> Counter[tuple[int, int]]:
    """(writer, number) of every row of the log."""
    with psycopg.connect(psycopg_url(url)) as connection:
        return Counter(
            connection.execute("SELECT writer_id, writer_seq FROM delivery_log").fetchall()
        )


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Every row of every sealed segment."""
    paths = files_of(folder)
    return (
        []
        if not paths
        else list(
            ds.dataset([str(path) for path in paths], format="parquet").to_table().to_pylist()
        )
    )


def files_of(folder: Path) -> list[Path]:
    """The sealed segments."""
    return sorted(
        path for path in folder.rglob("*.parquet*") if not path.name.startswith(("_", "."))
    )


def sealed(folder: Path) -> Counter[tuple[int, int]]:
    """(writer, number) of every row that left."""
    return Counter((row["writer_id"], row["writer_seq"]) for row in rows_of(folder))


def long_ago() -> datetime:
    """The birth of a message whose day is no partition's beginning by chance."""
    return datetime.now(UTC) - timedelta(days=40)


def execute(url: str, statement: str) -> list[tuple[Any, ...]]:
    """Run a statement in a transaction of its own, and return its rows."""
    with psycopg.connect(psycopg_url(url), autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []
