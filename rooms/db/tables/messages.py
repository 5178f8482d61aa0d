"""Declare the tables of messages, of their deliveries, and of the log of both."""

from typing import Final

from sqlalchemy import (
    Boolean,
    Column,
    PrimaryKeyConstraint,
    Table,
    and_,
    column,
    false,
    func,
    table,
)
from sqlalchemy.dialects.postgresql import REAL

from rooms.db.tables.columns import (
    DELIVERY_STATE,
    Xid8,
    big_column,
    bytes_column,
    id_column,
    int_column,
    metadata,
    room_column,
    small_column,
    text_column,
    time_column,
    time_or_null,
)

messages: Final = Table(
    "messages",
    metadata,
    room_column(),
    id_column("id"),
    text_column("event_type"),
    int_column("event_version"),
    small_column("priority"),
    int_column("fanout"),
    time_column("published_at"),
    time_or_null("expires_at"),
    id_column("publisher_id", null=True),
    text_column("correlation_id"),
    text_column("ordering_key", null=True),
    bytes_column("headers", null=True),
    bytes_column("payload"),
    time_or_null("due_at"),
    text_column("business_key", null=True),
    text_column("caller_id", null=True),
    id_column("publisher_organisation_id", null=True),
    text_column("application", null=True),
    Column("directed", Boolean, nullable=False, server_default=false()),
    PrimaryKeyConstraint("room_id", "id"),
)
"""`publisher_organisation_id` null: the room's owner published it. `caller_id` is the key of
`message_ids`: that of another organisation begins with the organisation. `directed`: it was
published with `destinations`.
"""

IS_OPERATIONAL_MESSAGE: Final = and_(
    messages.c.publisher_id.is_(None), messages.c.event_type.startswith("rooms.", autoescape=True)
)
"""The condition that Rooms itself published a message, for one operational subscription.

A message that was made again from a broker's copy has no publisher either, but its own event type.
"""

message_ids: Final = Table(
    "message_ids",
    metadata,
    room_column(),
    text_column("caller_id"),
    id_column("message_id"),
    bytes_column("content_hash"),
    bytes_column("answer"),
    PrimaryKeyConstraint("room_id", "caller_id"),
)

idempotency_keys: Final = Table(
    "idempotency_keys",
    metadata,
    room_column(),
    text_column("key"),
    id_column("message_id"),
    bytes_column("request_hash"),
    bytes_column("answer"),
    time_column("created_at"),
    PrimaryKeyConstraint("room_id", "key"),
)

deliveries: Final = Table(
    "deliveries",
    metadata,
    room_column(),
    id_column("id"),
    id_column("message_id"),
    id_column("subscription_id"),
    Column("state", DELIVERY_STATE, nullable=False),
    int_column("generation", default="0"),
    int_column("attempt", default="0"),
    int_column("attempts", default="0"),
    small_column("last_status", null=True),
    time_or_null("due_at"),
    time_or_null("expires_at"),
    time_column("updated_at"),
    text_column("reason", null=True),
    text_column("last_error", null=True),
    small_column("shovels", default="0"),
    big_column("sequence", null=True),
    PrimaryKeyConstraint("room_id", "id"),
)
"""`sequence` null: it has no number within its subscription and ordering key."""

log_entries: Final = Table(
    "log_entries",
    metadata,
    room_column(),
    id_column("message_id"),
    int_column("writer_id"),
    big_column("writer_seq"),
    Column("xid", Xid8, nullable=False, server_default=func.pg_current_xact_id()),
    time_column("ts"),
    text_column("kind"),
    id_column("subscription_id", null=True),
    id_column("delivery_id", null=True),
    int_column("generation", null=True),
    int_column("attempt", null=True),
    int_column("event_version", null=True),
    int_column("fanout", null=True),
    int_column("payload_bytes", null=True),
    int_column("policy_version", null=True),
    big_column("delay_ms", null=True),
    Column("latency_ms", REAL, nullable=True),
    int_column("worker", null=True),
    small_column("http_status", null=True),
    small_column("schema_version", default="1"),
    text_column("correlation_id", null=True),
    text_column("event_type", null=True),
    text_column("target_host", null=True),
    text_column("worker_host", null=True),
    text_column("error_class", null=True),
    text_column("detail", null=True),
    bytes_column("answer_head", null=True),
    bytes_column("enqueued", null=True),
    PrimaryKeyConstraint("room_id", "message_id", "writer_id", "writer_seq"),
)
"""The log as it is written: a publish with its deliveries (`enqueued`) is one row, and so is a
success with its attempt.
"""

delivery_log: Final = table(
    "delivery_log",
    *(column(of.name, of.type) for of in log_entries.columns if of.name != "enqueued"),
)
"""The view to read the log by: one row for each step, as if each had been written separately."""
