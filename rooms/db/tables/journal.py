"""Declare the tables of the journal."""

from typing import Final

from sqlalchemy import JSON, Column, DateTime, PrimaryKeyConstraint, Table

from rooms.db.tables.columns import big_column, bytes_column, id_column, metadata, text_column

journal: Final = Table(
    "journal",
    metadata,
    id_column("organisation_id"),
    big_column("seq"),
    id_column("id"),
    Column("at", DateTime(timezone=True), nullable=False),
    text_column("actor_kind"),
    id_column("actor_id", null=True),
    text_column("actor_name"),
    id_column("actor_organisation_id", null=True),
    text_column("application", null=True),
    text_column("source", null=True),
    text_column("request_id", null=True),
    text_column("action"),
    text_column("object"),
    Column("before", JSON(none_as_null=True), nullable=True),
    Column("after", JSON(none_as_null=True), nullable=True),
    text_column("outcome"),
    text_column("reason", null=True),
    bytes_column("previous_hash"),
    bytes_column("hash"),
    PrimaryKeyConstraint("organisation_id", "seq"),
)

journal_heads: Final = Table(
    "journal_heads",
    metadata,
    id_column("organisation_id"),
    big_column("seq"),
    bytes_column("previous_hash"),
    bytes_column("hash"),
    big_column("kept_from", default="1"),
    PrimaryKeyConstraint("organisation_id"),
)
