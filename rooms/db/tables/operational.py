"""Declare the tables of operational events, which maintenance empties."""

from typing import Final

from sqlalchemy import BigInteger, Column, DateTime, Identity, PrimaryKeyConstraint, Table
from sqlalchemy.dialects.postgresql import JSONB

from rooms.db.tables.columns import (
    big_column,
    bytes_column,
    id_column,
    metadata,
    room_column,
    small_column,
    text_column,
    time_column,
)

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
