"""Declare the tables of the keys that sign messages and receipts."""

from typing import Final

from sqlalchemy import JSON, Column, ForeignKey, PrimaryKeyConstraint, Table, Uuid

from rooms.db.tables.columns import (
    bytes_column,
    metadata,
    text_column,
    time_column,
    time_or_null,
)

signing_keys: Final = Table(
    "signing_keys",
    metadata,
    Column("organisation_id", Uuid(as_uuid=False), ForeignKey("organisations.id"), nullable=False),
    text_column("kid"),
    text_column("name"),
    Column("jwk", JSON, nullable=False),
    time_column("created_at"),
    time_or_null("revoked_at"),
    PrimaryKeyConstraint("organisation_id", "kid"),
)
"""Public keys of organisations, also revoked ones."""

receipt_keys: Final = Table(
    "receipt_keys",
    metadata,
    text_column("kid"),
    Column("jwk", JSON, nullable=False),
    bytes_column("encrypted_key", null=True),
    time_column("created_at"),
    time_or_null("retired_at"),
    PrimaryKeyConstraint("kid"),
)
"""The installation's own keys; the one that is not retired signs."""
