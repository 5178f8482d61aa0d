"""The tables as SQLAlchemy Core sees them. The migrations make them; a test compares the two, column by column.

Ids are text in the house and `uuid` in the database. The views of what a column means stand with the domain's values.
"""

from typing import Any, Final

from sqlalchemy import (
    ARRAY,
    BigInteger,
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
    SmallInteger,
    Table,
    Text,
    Uuid,
    func,
)
from sqlalchemy.dialects.postgresql import ENUM, JSONB, REAL
from sqlalchemy.types import UserDefinedType

from rooms.domain.states import State

metadata: Final = MetaData()


class Xid8(UserDefinedType[int]):
    """A transaction's number, 64 bits wide."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        """PostgreSQL's name of the type."""
        return "xid8"


DELIVERY_STATE: Final = ENUM(*(state.value for state in State), name="delivery_state", metadata=metadata)


def _id(name: str, *, null: bool = False) -> Column[str]:
    return Column(name, Uuid(as_uuid=False), nullable=null)


def _room() -> Column[int]:
    return Column("room_id", Integer, nullable=False)


def _text(name: str, *, null: bool = False, default: str | None = None) -> Column[str]:
    return Column(name, Text, nullable=null, server_default=default)


def _number(name: str, *, null: bool = False, default: str | None = None) -> Column[int]:
    return Column(name, Integer, nullable=null, server_default=default)


def _small(name: str, *, null: bool = False, default: str | None = None) -> Column[int]:
    return Column(name, SmallInteger, nullable=null, server_default=default)


def _big(name: str, *, null: bool = False, default: str | None = None) -> Column[int]:
    return Column(name, BigInteger, nullable=null, server_default=default)


def _flag(name: str) -> Column[bool]:
    return Column(name, Boolean, nullable=False, server_default="false")


def _bytes(name: str, *, null: bool = False) -> Column[bytes]:
    return Column(name, LargeBinary, nullable=null)


def _time(name: str) -> Column[Any]:
    return Column(name, DateTime(timezone=True), nullable=False, server_default=func.now())


def _time_or_null(name: str) -> Column[Any]:
    return Column(name, DateTime(timezone=True), nullable=True)


organisations: Final = Table(
    "organisations",
    metadata,
    _id("id"),
    Column("name", Text, nullable=False, unique=True),
    _time("created_at"),
    PrimaryKeyConstraint("id"),
)

api_keys: Final = Table(
    "api_keys",
    metadata,
    _id("id"),
    Column("organisation_id", Uuid(as_uuid=False), ForeignKey("organisations.id"), nullable=False),
    _text("name"),
    Column("key_hash", LargeBinary, nullable=False, unique=True),
    Column("scopes", ARRAY(Text), nullable=False),
    _time("created_at"),
    _time_or_null("revoked_at"),
    PrimaryKeyConstraint("id"),
)

rooms: Final = Table(
    "rooms",
    metadata,
    Column("id", Integer, nullable=False, autoincrement=False),
    Column("organisation_id", Uuid(as_uuid=False), ForeignKey("organisations.id"), nullable=False),
    _text("name"),
    _text("description", null=True),
    _big("message_expiration_ms", null=True),
    _big("delivery_delay_ms"),
    Column("delivery_delay_multiplier", Double, nullable=False),
    _number("delivery_attempts"),
    _big("delivery_max_delay_ms", null=True),
    Column("delivery_jitter", Double, nullable=False, server_default="0"),
    _big("plan_version", default="1"),
    _flag("deleting"),
    _time("created_at"),
    _time("updated_at"),
    PrimaryKeyConstraint("id"),
)

jobs: Final = Table(
    "jobs",
    metadata,
    _id("id"),
    Column("organisation_id", Uuid(as_uuid=False), ForeignKey("organisations.id"), nullable=False),
    _number("room_id", null=True),
    _text("kind"),
    Column("arguments", JSONB, nullable=False, server_default="{}"),
    _text("state", default="queued"),
    _big("done", default="0"),
    _big("total", null=True),
    _text("error", null=True),
    _time("created_at"),
    _time("updated_at"),
    _time_or_null("finished_at"),
    PrimaryKeyConstraint("id"),
)

writers: Final = Table(
    "writers",
    metadata,
    Column("id", Integer, Identity(always=True), nullable=False),
    _text("kind"),
    _text("host"),
    _number("pid"),
    _time("started_at"),
    PrimaryKeyConstraint("id"),
)

upkeep_marks: Final = Table(
    "upkeep_marks",
    metadata,
    _text("name"),
    Column("at", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("name"),
)

event_types: Final = Table(
    "event_types",
    metadata,
    _room(),
    _id("id"),
    _text("name"),
    _number("latest_version", default="1"),
    _time("created_at"),
    PrimaryKeyConstraint("room_id", "id"),
)

event_type_versions: Final = Table(
    "event_type_versions",
    metadata,
    _room(),
    _id("id"),
    _id("event_type_id"),
    _number("version"),
    Column("schema", JSONB(none_as_null=True), nullable=True),
    _time("created_at"),
    PrimaryKeyConstraint("room_id", "id"),
)

subscriptions: Final = Table(
    "subscriptions",
    metadata,
    _room(),
    _id("id"),
    _text("name"),
    _text("type"),
    Column("event_types", JSONB(none_as_null=True), nullable=True),
    _text("push_url", null=True),
    _big("delivery_delay_ms", null=True),
    Column("delivery_delay_multiplier", Double, nullable=True),
    _number("delivery_attempts", null=True),
    Column("headers", JSONB, nullable=False, server_default="{}"),
    Column("terminal_statuses", ARRAY(Integer), nullable=False, server_default="{}"),
    Column("ignorable_statuses", ARRAY(Integer), nullable=False, server_default="{}"),
    _number("timeout_ms"),
    _number("max_receives", null=True),
    _flag("cloud_events"),
    _bytes("secret", null=True),
    _bytes("previous_secret", null=True),
    _time_or_null("previous_secret_until"),
    _text("status", default="active"),
    _text("status_reason", null=True),
    _time("status_since"),
    _number("version", default="1"),
    _time("created_at"),
    _time("updated_at"),
    PrimaryKeyConstraint("room_id", "id"),
)

idempotency_keys: Final = Table(
    "idempotency_keys",
    metadata,
    _room(),
    _text("key"),
    _id("message_id"),
    _bytes("request_hash"),
    _bytes("answer"),
    _time("created_at"),
    PrimaryKeyConstraint("room_id", "key"),
)

messages: Final = Table(
    "messages",
    metadata,
    _room(),
    _id("id"),
    _text("event_type"),
    _number("event_version"),
    _small("priority"),
    _number("fanout"),
    _time("published_at"),
    _time_or_null("expires_at"),
    _id("publisher_id", null=True),
    _text("correlation_id"),
    _text("ordering_key", null=True),
    _bytes("headers", null=True),
    _bytes("payload"),
    PrimaryKeyConstraint("room_id", "id"),
)

deliveries: Final = Table(
    "deliveries",
    metadata,
    _room(),
    _id("id"),
    _id("message_id"),
    _id("subscription_id"),
    Column("state", DELIVERY_STATE, nullable=False),
    _number("generation", default="0"),
    _number("attempt", default="0"),
    _number("attempts", default="0"),
    _small("last_status", null=True),
    _time_or_null("due_at"),
    _time_or_null("expires_at"),
    _time("updated_at"),
    _text("reason", null=True),
    _text("last_error", null=True),
    PrimaryKeyConstraint("room_id", "id"),
)

delivery_log: Final = Table(
    "delivery_log",
    metadata,
    _room(),
    _id("message_id"),
    _number("writer_id"),
    _big("writer_seq"),
    Column("xid", Xid8, nullable=False, server_default=func.pg_current_xact_id()),
    _time("ts"),
    _text("kind"),
    _id("subscription_id", null=True),
    _id("delivery_id", null=True),
    _number("generation", null=True),
    _number("attempt", null=True),
    _number("event_version", null=True),
    _number("fanout", null=True),
    _number("payload_bytes", null=True),
    _number("policy_version", null=True),
    _big("delay_ms", null=True),
    Column("latency_ms", REAL, nullable=True),
    _number("worker", null=True),
    _small("http_status", null=True),
    _small("schema_version", default="1"),
    _text("correlation_id", null=True),
    _text("event_type", null=True),
    _text("target_host", null=True),
    _text("worker_host", null=True),
    _text("error_class", null=True),
    _text("detail", null=True),
    _bytes("answer_head", null=True),
    PrimaryKeyConstraint("room_id", "message_id", "writer_id", "writer_seq"),
)

outbox: Final = Table(
    "outbox",
    metadata,
    _room(),
    _id("id"),
    _id("message_id"),
    _id("subscription_id"),
    _small("kind"),
    _small("priority"),
    _number("generation"),
    _number("attempt"),
    _big("delay_ms", default="0"),
    Column("due_at", DateTime(timezone=True), nullable=False),
    _time_or_null("expires_at"),
    Column("claimed_until", DateTime(timezone=True), nullable=False, server_default="-infinity"),
    _number("worker", null=True),
    PrimaryKeyConstraint("room_id", "id"),
)

held: Final = Table(
    "held",
    metadata,
    _room(),
    _id("id"),
    _id("subscription_id"),
    _small("priority"),
    _big("delay_ms"),
    _time("since"),
    _text("reason"),
    PrimaryKeyConstraint("room_id", "id"),
)

leases: Final = Table(
    "leases",
    metadata,
    _room(),
    _id("id"),
    _id("subscription_id"),
    _number("generation"),
    Column("until", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("room_id", "id"),
)
