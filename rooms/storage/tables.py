"""The tables as SQLAlchemy Core sees them. The migrations make them; a test compares the two, column by column."""

from typing import Final

from sqlalchemy import (
    ARRAY,
    Boolean,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    Uuid,
    func,
)
from sqlalchemy.dialects.postgresql import ENUM, JSONB, REAL

from rooms.domain.states import State
from rooms.storage.columns import (
    Xid8,
    big_column,
    bytes_column,
    flag_column,
    id_column,
    int_column,
    room_column,
    small_column,
    text_column,
    time_column,
    time_or_null,
)

metadata: Final = MetaData()
DELIVERY_STATE: Final = ENUM(*(state.value for state in State), name="delivery_state", metadata=metadata)

organisations: Final = Table(
    "organisations",
    metadata,
    id_column("id"),
    Column("name", Text, nullable=False, unique=True),
    time_column("created_at"),
    PrimaryKeyConstraint("id"),
)

api_keys: Final = Table(
    "api_keys",
    metadata,
    id_column("id"),
    Column("organisation_id", Uuid(as_uuid=False), ForeignKey("organisations.id"), nullable=False),
    text_column("name"),
    Column("key_hash", LargeBinary, nullable=False, unique=True),
    Column("scopes", ARRAY(Text), nullable=False),
    time_column("created_at"),
    time_or_null("revoked_at"),
    PrimaryKeyConstraint("id"),
)

rooms: Final = Table(
    "rooms",
    metadata,
    Column("id", Integer, nullable=False, autoincrement=False),
    Column("organisation_id", Uuid(as_uuid=False), ForeignKey("organisations.id"), nullable=False),
    text_column("name"),
    text_column("description", null=True),
    big_column("message_expiration_ms", null=True),
    big_column("delivery_delay_ms"),
    Column("delivery_delay_multiplier", Double, nullable=False),
    int_column("delivery_attempts"),
    big_column("delivery_max_delay_ms", null=True),
    Column("delivery_jitter", Double, nullable=False, server_default="0"),
    big_column("plan_version", default="1"),
    flag_column("deleting"),
    time_column("created_at"),
    time_column("updated_at"),
    int_column("max_concurrency", null=True),
    Column("rate_per_s", Double, nullable=True),
    int_column("rate_burst", null=True),
    int_column("circuit_failures", null=True),
    big_column("circuit_window_ms", null=True),
    big_column("circuit_open_ms", null=True),
    Column("drain_per_s", Double, nullable=True),
    big_column("disable_after_ms", null=True),
    text_column("operational_url", null=True),
    int_column("timeout_ms", null=True),
    flag_column("ordered"),
    PrimaryKeyConstraint("id"),
)

jobs: Final = Table(
    "jobs",
    metadata,
    id_column("id"),
    Column("organisation_id", Uuid(as_uuid=False), ForeignKey("organisations.id"), nullable=False),
    int_column("room_id", null=True),
    text_column("kind"),
    Column("arguments", JSONB, nullable=False, server_default="{}"),
    text_column("state", default="queued"),
    big_column("done", default="0"),
    big_column("total", null=True),
    text_column("error", null=True),
    time_column("created_at"),
    time_column("updated_at"),
    time_or_null("finished_at"),
    Column("result", JSONB(none_as_null=True), nullable=True),
    Column("position", JSONB(none_as_null=True), nullable=True),
    PrimaryKeyConstraint("id"),
)

writers: Final = Table(
    "writers",
    metadata,
    Column("id", Integer, Identity(always=True), nullable=False),
    text_column("kind"),
    text_column("host"),
    int_column("pid"),
    time_column("started_at"),
    PrimaryKeyConstraint("id"),
)

upkeep_marks: Final = Table(
    "upkeep_marks",
    metadata,
    text_column("name"),
    Column("at", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("name"),
)

due_buckets: Final = Table(
    "due_buckets",
    metadata,
    Column("one", Boolean, nullable=False, server_default="true"),
    int_column("count", default="8"),
    PrimaryKeyConstraint("one"),
)

election_members: Final = Table(
    "election_members",
    metadata,
    Column("id", Integer, Identity(always=True), nullable=False),
    text_column("name"),
    text_column("host"),
    int_column("pid"),
    text_column("process", null=True),
    time_column("since"),
    Column("until", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("id"),
)

election_partitions: Final = Table(
    "election_partitions",
    metadata,
    text_column("name"),
    int_column("member", null=True),
    big_column("assigned"),
    int_column("holder", null=True),
    big_column("epoch", default="0"),
    PrimaryKeyConstraint("name"),
)

election_terms: Final = Table(
    "election_terms",
    metadata,
    Column("one", Boolean, nullable=False, server_default="true"),
    big_column("epoch", default="0"),
    big_column("term", default="0"),
    text_column("leader", null=True),
    time_column("led_at"),
    PrimaryKeyConstraint("one"),
)

event_types: Final = Table(
    "event_types",
    metadata,
    room_column(),
    id_column("id"),
    text_column("name"),
    int_column("latest_version", default="1"),
    time_column("created_at"),
    PrimaryKeyConstraint("room_id", "id"),
)

event_type_versions: Final = Table(
    "event_type_versions",
    metadata,
    room_column(),
    id_column("id"),
    id_column("event_type_id"),
    int_column("version"),
    Column("schema", JSONB(none_as_null=True), nullable=True),
    time_column("created_at"),
    PrimaryKeyConstraint("room_id", "id"),
)

subscriptions: Final = Table(
    "subscriptions",
    metadata,
    room_column(),
    id_column("id"),
    text_column("name"),
    text_column("type"),
    Column("event_types", JSONB(none_as_null=True), nullable=True),
    text_column("push_url", null=True),
    big_column("delivery_delay_ms", null=True),
    Column("delivery_delay_multiplier", Double, nullable=True),
    int_column("delivery_attempts", null=True),
    Column("headers", JSONB, nullable=False, server_default="{}"),
    Column("terminal_statuses", ARRAY(Integer), nullable=False, server_default="{}"),
    Column("ignorable_statuses", ARRAY(Integer), nullable=False, server_default="{}"),
    int_column("timeout_ms", null=True),
    int_column("max_receives", null=True),
    flag_column("cloud_events"),
    bytes_column("secret", null=True),
    bytes_column("previous_secret", null=True),
    time_or_null("previous_secret_until"),
    text_column("status", default="active"),
    text_column("status_reason", null=True),
    time_column("status_since"),
    int_column("version", default="1"),
    time_column("created_at"),
    time_column("updated_at"),
    small_column("sideline_shards", null=True),
    text_column("native_password", null=True),
    int_column("max_concurrency", null=True),
    Column("rate_per_s", Double, nullable=True),
    int_column("rate_burst", null=True),
    int_column("circuit_failures", null=True),
    big_column("circuit_window_ms", null=True),
    big_column("circuit_open_ms", null=True),
    Column("drain_per_s", Double, nullable=True),
    big_column("disable_after_ms", null=True),
    flag_column("operational"),
    text_column("filter", null=True),
    Column("ordered", Boolean, nullable=True),
    PrimaryKeyConstraint("room_id", "id"),
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
    PrimaryKeyConstraint("room_id", "id"),
)

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
    PrimaryKeyConstraint("room_id", "id"),
)

delivery_log: Final = Table(
    "delivery_log",
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
    PrimaryKeyConstraint("room_id", "message_id", "writer_id", "writer_seq"),
)

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

leases: Final = Table(
    "leases",
    metadata,
    room_column(),
    id_column("id"),
    id_column("subscription_id"),
    int_column("generation"),
    Column("until", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("room_id", "id"),
)
