"""Declare the work tables.

A row is a delivery that is queued, held, leased or sidelined, or that waits for its ordering key.
`sequences` holds how far the numbers of an ordering key have come.
`lanes` holds the shared state of a subscription's lane.
"""

from typing import Final

from sqlalchemy import Column, DateTime, PrimaryKeyConstraint, Table

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
