"""Declare the tables of organisations, of their API keys, and of their jobs."""

from typing import Final

from sqlalchemy import (
    ARRAY,
    Column,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from rooms.db.tables.columns import (
    big_column,
    id_column,
    int_column,
    metadata,
    text_column,
    time_column,
    time_or_null,
)

organisations: Final = Table(
    "organisations",
    metadata,
    id_column("id"),
    Column("name", Text, nullable=False, unique=True),
    time_column("created_at"),
    Column("member_id", Text, nullable=True, unique=True),
    text_column("contact", null=True),
    text_column("status", default="active"),
    text_column("status_reason", null=True),
    time_column("status_since"),
    time_column("updated_at"),
    Column("quotas", JSONB(none_as_null=True), nullable=True),
    text_column("push_template", null=True),
    PrimaryKeyConstraint("id"),
)

api_keys: Final = Table(
    "api_keys",
    metadata,
    id_column("id"),
    Column("organisation_id", Uuid(as_uuid=False), ForeignKey("organisations.id"), nullable=False),
    text_column("name"),
    Column("key_hash", LargeBinary, nullable=True, unique=True),
    Column("scopes", ARRAY(Text), nullable=False),
    time_column("created_at"),
    time_or_null("revoked_at"),
    text_column("application", null=True),
    Column("rooms", ARRAY(Integer), nullable=True),
    Column("event_types", ARRAY(Text), nullable=True),
    Column("subscriptions", ARRAY(Uuid(as_uuid=False)), nullable=True),
    Column("networks", ARRAY(Text), nullable=True),
    time_or_null("expires_at"),
    time_or_null("last_used_at"),
    text_column("prefix", null=True),
    Column("previous_key_hash", LargeBinary, nullable=True, unique=True),
    time_or_null("previous_until"),
    text_column("kind", default="key"),
    id_column("parent_id", null=True),
    time_or_null("ends_at"),
    PrimaryKeyConstraint("id"),
    Index("api_keys_sessions", "organisation_id", "id", postgresql_where=text("kind = 'session'")),
    Index("api_keys_parent", "parent_id", postgresql_where=text("parent_id IS NOT NULL")),
)

sign_in_links: Final = Table(
    "sign_in_links",
    metadata,
    Column("token_hash", LargeBinary, nullable=False),
    Column("organisation_id", Uuid(as_uuid=False), ForeignKey("organisations.id"), nullable=False),
    text_column("kind"),
    text_column("name"),
    Column("scopes", ARRAY(Text), nullable=False),
    Column("rooms", ARRAY(Integer), nullable=True),
    Column("subscriptions", ARRAY(Uuid(as_uuid=False)), nullable=True),
    id_column("created_by", null=True),
    time_column("created_at"),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    int_column("session_s"),
    time_or_null("used_at"),
    PrimaryKeyConstraint("token_hash"),
    Index("sign_in_links_expires", "expires_at"),
    Index("sign_in_links_organisation", "organisation_id"),
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
