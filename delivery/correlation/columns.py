"""The columns of a sealed segment: `delivery_log` as it leaves PostgreSQL, and whole-number keys of its ids.

Segments lie in `dt=YYYY-MM-DD/hr=HH` by the UTC hour of `ts`; a file is never changed once it is there. Ids stand as text
for people and as two 64-bit halves for joins: text keys make every join half as slow again. This module imports neither
Spark nor Arrow, so that whoever writes segments and whoever reads them take the columns from here.
"""

from dataclasses import dataclass
from typing import Final

VERSION: Final = 1
"""Of this layout. A column may be added; what a column means never changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column. `type` is Spark's name of it: int, bigint, float, double, boolean, string, binary, timestamp."""

    name: str
    type: str
    says: str
    nullable: bool = True


def _column(name: str, kind: str, says: str) -> Column:
    return Column(name=name, type=kind.rstrip("!"), says=says, nullable=not kind.endswith("!"))


SEGMENT: Final = (
    _column("room_id", "int!", "the room"),
    _column("message_id", "string!", "UUIDv7 of the message"),
    _column("message_hi", "bigint!", "its first 64 bits, signed; the first 48 are its millisecond"),
    _column("message_lo", "bigint!", "its last 64 bits, signed"),
    _column("writer_id", "int!", "who wrote the row"),
    _column("writer_seq", "bigint!", "counts the writer's rows from 1 without a gap"),
    _column("xid", "bigint!", "transaction that wrote it"),
    _column("ts", "timestamp!", "when it began, by PostgreSQL's clock; µs, UTC"),
    _column("kind", "string!", "what happened: a value of LogKind"),
    _column("subscription_id", "string", "null: it is about the message"),
    _column("delivery_id", "string", "null: it is about the message"),
    _column("delivery_hi", "bigint", "first half of delivery_id"),
    _column("delivery_lo", "bigint", "last half of delivery_id"),
    _column("generation", "int", "of the delivery's step"),
    _column("attempt", "int", "of the delivery's step"),
    _column("event_version", "int", "of the message"),
    _column("fanout", "int", "deliveries that the transaction made; on published and replayed"),
    _column("payload_bytes", "int", "size of the payload; on published"),
    _column("policy_version", "int", "version of the subscription that decided"),
    _column("delay_ms", "bigint", "wait before the step"),
    _column("latency_ms", "float", "duration of an attempt"),
    _column("worker", "int", "writer id of the worker that attempted"),
    _column("http_status", "int", "null: no complete answer"),
    _column("schema_version", "int!", "layout of the log row"),
    _column("correlation_id", "string", "as the publisher gave it"),
    _column("event_type", "string", "of the message"),
    _column("target_host", "string", "host of the webhook"),
    _column("worker_host", "string", "machine that wrote it"),
    _column("error_class", "string", "why an attempt failed; null on success"),
    _column("detail", "string", "reason or message for people"),
)


def ddl(columns: tuple[Column, ...]) -> str:
    """The columns as Spark's schema text."""
    return ", ".join(f"`{column.name}` {column.type}" for column in columns)
