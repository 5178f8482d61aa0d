"""Declare the tables of magazines and handler queues.

Magazines name no room: one magazine is independent of all others and found by its own id. An
installation that outgrows one PostgreSQL server keeps magazines in Aerospike, which shards by
itself.
"""

from typing import Final

from sqlalchemy import (
    Boolean,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Integer,
    PrimaryKeyConstraint,
    Table,
    Text,
    Uuid,
)
from sqlalchemy.dialects.postgresql import JSONB

from rooms.db.tables.columns import (
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

magazines: Final = Table(
    "magazines",
    metadata,
    Column("id", Integer, Identity(always=True), primary_key=True),
    text_column("name"),
    int_column("shards"),
    flag_column("expires"),
    time_column("created_at"),
)

magazine_pointers: Final = Table(
    "magazine_pointers",
    metadata,
    int_column("magazine_id"),
    small_column("kind"),
    small_column("shard"),
    *(
        big_column(name, default="0")
        for name in ("pointer", "epoch", "loaded", "fired", "deleted", "reloaded", "swept")
    ),
    PrimaryKeyConstraint("magazine_id", "kind", "shard"),
)

magazine_entries: Final = Table(
    "magazine_entries",
    metadata,
    big_column("pointer"),
    time_column("loaded_at"),
    time_or_null("fire_ts"),
    time_or_null("expires_at"),
    int_column("magazine_id"),
    int_column("generation", default="0"),
    int_column("shovels", default="0"),
    small_column("shard"),
    text_column("id"),
    text_column("reason", null=True),
    text_column("detail", null=True),
    bytes_column("body"),
    PrimaryKeyConstraint("magazine_id", "shard", "pointer"),
)

shovel_schedules: Final = Table(
    "shovel_schedules",
    metadata,
    room_column(),
    id_column("subscription_id"),
    int_column("interval_s"),
    Column("rate_per_s", Double, nullable=True),
    int_column("concurrency"),
    int_column("max_shovels"),
    time_column("next_at"),
    id_column("organisation_id", null=True),  # of the subscription
    PrimaryKeyConstraint("room_id", "subscription_id"),
)

handler_queues: Final = Table(
    "handler_queues",
    metadata,
    Column("name", Text, primary_key=True),
    text_column("handler_type"),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("active", Boolean, nullable=False, server_default="true"),
    int_column("shards"),
    int_column("queue_expiry_s", null=True),
    int_column("message_expiry_s", null=True),
    int_column("concurrency"),
    int_column("shovel_concurrency"),
    int_column("shovel_interval_s"),
    int_column("sweep_duration_s"),
    int_column("max_batch"),
    int_column("max_wait_s"),
)

queues: Final = Table(
    "queues",
    metadata,
    Column("name", Text, primary_key=True),
    Column("organisation_id", Uuid(as_uuid=False), ForeignKey("organisations.id"), nullable=False),
    Column("settings", JSONB, nullable=False),
    flag_column("deleting"),
    time_column("created_at"),
    time_column("updated_at"),
    text_column("display_name", null=True),
    # Of a schedule; null: its interval has not started.
    # Of a one-shot shovel its last request; null: when the queue was created.
    time_or_null("shovel_next_at"),
)
