"""Declare the tables of messages, of their deliveries and work, of operational events, and the log.

A row of the work tables is a delivery that is queued, held, leased or sidelined, or that waits for
its ordering key. `sequences` holds how far the numbers of an ordering key have come. `lanes` holds
the shared state of a subscription's lane. The tables of operational events are emptied by
maintenance.
"""

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Identity,
    PrimaryKeyConstraint,
    Table,
    and_,
    column,
    false,
    func,
    table,
)
from sqlalchemy.dialects.postgresql import JSONB, REAL

from rooms.db.tables.columns import (
    DELIVERY_STATE,
    Xid8,
    big_column,
    bytes_column,
    flag_column,
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
outbox: Final = Table(
    "outbox",
    metadata,
    room_column(),
    id_column("id"),
    id_column("message_id"),
    id_column("subscription_id"),
    small_column("kind"),
    small_column("priority"),
    int_column("generation"),
    int_column("attempt"),
    big_column("delay_ms", default="0"),
    Column("due_at", DateTime(timezone=True), nullable=False),
    time_or_null("expires_at"),
    Column("claimed_until", DateTime(timezone=True), nullable=False, server_default="-infinity"),
    int_column("worker", null=True),
    small_column("abandoned", null=True),
    PrimaryKeyConstraint("room_id", "id"),
)

held: Final = Table(
    "held",
    metadata,
    room_column(),
    id_column("id"),
    id_column("subscription_id"),
    small_column("priority"),
    big_column("delay_ms"),
    time_column("since"),
    text_column("reason"),
    small_column("abandoned", null=True),
    PrimaryKeyConstraint("room_id", "id"),
)

leases: Final = Table(
    "leases",
    metadata,
    room_column(),
    id_column("id"),
    id_column("subscription_id"),
    int_column("generation"),
    Column("until", DateTime(timezone=True), nullable=False),
    id_column("key_id", null=True),
    text_column("holder", null=True),
    PrimaryKeyConstraint("room_id", "id"),
)
"""`holder`: the caller whose next pull acknowledges it; null: it is acknowledged by its id only.
`key_id`: the key of the consumer that has it.
"""

sidelined: Final = Table(
    "sidelined",
    metadata,
    room_column(),
    id_column("id"),
    id_column("subscription_id"),
    int_column("generation"),
    time_column("since"),
    text_column("reason"),
    small_column("shard", null=True),
    big_column("pointer", null=True),
    PrimaryKeyConstraint("room_id", "id"),
)

lanes: Final = Table(
    "lanes",
    metadata,
    room_column(),
    id_column("id"),
    flag_column("circuit_open"),
    time_or_null("circuit_since"),
    time_or_null("probe_at"),
    id_column("probe", null=True),
    int_column("probe_generation", null=True),
    int_column("probe_attempt", null=True),
    int_column("probes", default="0"),
    time_or_null("failing_since"),
    Column("drained_until", DateTime(timezone=True), nullable=False, server_default="-infinity"),
    Column("spent_until", DateTime(timezone=True), nullable=False, server_default="-infinity"),
    int_column("concurrency", null=True),
    time_or_null("concurrency_at"),
    PrimaryKeyConstraint("room_id", "id"),
)

ordered_keys: Final = Table(
    "ordered_keys",
    metadata,
    room_column(),
    id_column("subscription_id"),
    bytes_column("key"),
    big_column("tail"),
    big_column("head"),
    id_column("head_id"),
    time_column("since"),
    PrimaryKeyConstraint("room_id", "subscription_id", "key"),
)

ordered_waiting: Final = Table(
    "ordered_waiting",
    metadata,
    room_column(),
    id_column("subscription_id"),
    bytes_column("key"),
    big_column("position"),
    id_column("id"),
    PrimaryKeyConstraint("room_id", "subscription_id", "key", "position"),
)

sequences: Final = Table(
    "sequences",
    metadata,
    room_column(),
    id_column("subscription_id"),
    bytes_column("key"),
    big_column("last"),
    time_column("updated_at"),
    PrimaryKeyConstraint("room_id", "subscription_id", "key"),
)
"""The last sequence number of each ordering key of an ordered subscription. A row outlives the
key's deliveries, until retention.
"""
operational_outbox: Final = Table(
    "operational_outbox",
    metadata,
    room_column(),
    text_column("event"),
    id_column("organisation_id"),
    Column("id", BigInteger, Identity(always=True), nullable=False),
    id_column("subscription_id", null=True),
    time_column("at"),
    Column("data", JSONB, nullable=False),
    PrimaryKeyConstraint("room_id", "event", "organisation_id", "id"),
)

operational_overflow: Final = Table(
    "operational_overflow",
    metadata,
    room_column(),
    text_column("event"),
    id_column("organisation_id"),
    small_column("slot"),
    big_column("total"),
    PrimaryKeyConstraint("room_id", "event", "organisation_id", "slot"),
)

operational_pace: Final = Table(
    "operational_pace",
    metadata,
    room_column(),
    text_column("event"),
    big_column("batches"),
    Column("spent_until", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("room_id", "event"),
)

operational_messages: Final = Table(
    "operational_messages",
    metadata,
    room_column(),
    id_column("id"),
    bytes_column("enqueued"),
    time_column("since"),
    time_column("check_at"),
    PrimaryKeyConstraint("room_id", "id"),
)
