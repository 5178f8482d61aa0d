"""Write rows of the log as processes do, in transactions that a test ends when it wants to."""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

import psycopg

from rooms.db.connection import psycopg_url


class Log:
    """Write rows of the log on a connection of its own, in transactions that the test ends."""

    def __init__(self, url: str, number: int) -> None:
        self.connection = psycopg.connect(psycopg_url(url))
        self.number = number
        self.seq = 0

    def write(
        self,
        room: int,
        kind: str,
        *,
        at: datetime | None = None,
        subscription: str | None = None,
        message: str | None = None,
        event_type: str | None = "order.created",
        enqueued: Sequence[str] = (),
        error: str | None = None,
        status: int | None = None,
        latency_ms: float | None = None,
    ) -> None:
        # Other rows follow in the numbers of a publish, and one comes before a success.
        self.seq += 2
        values = {
            "room": room, "message": message or str(uuid.uuid4()), "writer": self.number, "seq": self.seq, "kind": kind,
            "subscription": subscription, "type": event_type, "at": at, "error": error, "status": status,
            "latency": latency_ms,
            "bytes": 100 if kind == "published" else None,
            "enqueued": b"".join(
                uuid.UUID(one).bytes + uuid.uuid4().bytes + bytes(4) for one in enqueued
            ) or None,
        }  # fmt: skip
        self.connection.execute(
            "INSERT INTO log_entries (room_id, message_id, writer_id, writer_seq, kind, subscription_id, event_type, ts,"
            " payload_bytes, error_class, http_status, latency_ms, enqueued) VALUES (%(room)s, %(message)s, %(writer)s, %(seq)s, %(kind)s,"
            " %(subscription)s, %(type)s, coalesce(%(at)s, now()), %(bytes)s, %(error)s, %(status)s, %(latency)s, %(enqueued)s)",
            values,
        )
        self.seq += len(enqueued)

    def commit(self) -> None:
        self.connection.commit()


@contextmanager
def logging(url: str, number: int = 1) -> Iterator[Log]:
    log = Log(url, number)
    try:
        yield log
    finally:
        log.connection.close()
