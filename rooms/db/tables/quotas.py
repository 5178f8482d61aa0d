"""Declare the tables of quotas: what was used of daily limits, and what is stored."""

from typing import Final

from sqlalchemy import Column, Date, DateTime, PrimaryKeyConstraint, Table

from rooms.db.tables.columns import big_column, flag_column, metadata, text_column, time_column

quota_days: Final = Table(
    "quota_days",
    metadata,
    text_column("subject"),
    Column("day", Date, nullable=False),
    big_column("messages"),
    big_column("bytes"),
    Column("at", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("subject", "day"),
)
"""`subject`: `organisation:ID` or `room:ID`; days are those of UTC."""

quota_stored: Final = Table(
    "quota_stored",
    metadata,
    text_column("subject"),
    big_column("messages"),
    flag_column("is_full"),
    time_column("at"),
    PrimaryKeyConstraint("subject"),
)
"""Estimates of a task; `is_full`: publishing is refused."""
