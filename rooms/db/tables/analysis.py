"""Declare the tables of the log export and of the analysis results."""

from typing import Final

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Column,
    DateTime,
    Identity,
    Integer,
    PrimaryKeyConstraint,
    Table,
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

log_exports: Final = Table(
    "log_exports",
    metadata,
    Column("id", BigInteger, Identity(always=True), nullable=False),
    text_column("destination"),
    text_column("system"),
    big_column("first_xid"),
    big_column("end_xid"),
    time_column("planned_at"),
    time_or_null("sealed_at"),
    big_column("rows", null=True),
    big_column("bytes", null=True),
    int_column("files", null=True),
    time_or_null("seen_at"),
    PrimaryKeyConstraint("id"),
)

log_export_writers: Final = Table(
    "log_export_writers",
    metadata,
    text_column("destination"),
    text_column("system"),
    int_column("writer_id"),
    big_column("rows"),
    big_column("last_seq"),
    big_column("ended_xid", null=True),
    PrimaryKeyConstraint("destination", "system", "writer_id"),
)

analysis_runs: Final = Table(
    "analysis_runs",
    metadata,
    Column("id", BigInteger, Identity(always=True), nullable=False),
    big_column("run"),
    Column("analysed_at", DateTime(timezone=True), nullable=False),
    time_column("loaded_at"),
    Column("set_aside", JSONB, nullable=False, server_default=text("'[]'")),
    PrimaryKeyConstraint("id"),
)

analysis_rows: Final = Table(
    "analysis_rows",
    metadata,
    id_column("organisation_id"),
    text_column("finding"),
    big_column("number"),
    big_column("run_id"),
    Column("rooms", ARRAY(Integer), nullable=False),
    Column("subscriptions", ARRAY(Uuid(as_uuid=False)), nullable=False),
    time_or_null("began"),
    time_or_null("ended"),
    Column("body", JSONB, nullable=False),
    PrimaryKeyConstraint("organisation_id", "finding", "number"),
)
