"""Organisations, how their programs are known, and what they have asked for that takes a while."""

from typing import Final

from sqlalchemy import ARRAY, Column, ForeignKey, LargeBinary, PrimaryKeyConstraint, Table, Text, Uuid
from sqlalchemy.dialects.postgresql import JSONB

from rooms.storage.tables.columns import (
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
