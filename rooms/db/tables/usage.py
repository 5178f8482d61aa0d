"""Declare the tables of what is read off the log: usage, quotas, exports and results of analysis.

`usage_mark` holds how far the log is counted.
"""

from typing import Final

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    Column,
    Date,
    DateTime,
    Identity,
    Index,
    Integer,
    PrimaryKeyConstraint,
    Table,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from rooms.db.tables.columns import (
    big_column,
    flag_column,
    id_column,
    int_column,
    metadata,
    room_column,
    text_column,
    time_column,
    time_or_null,
)
from rooms.domain.usage import COUNTERS, HIDDEN_COLUMNS, MINUTE_COUNTERS

usage_hours: Final = Table(
    "usage_hours",
    metadata,
    room_column(),
    Column("hour", DateTime(timezone=True), nullable=False),
    id_column("owner_id"),
    id_column("organisation_id"),
    text_column("event_type"),
    *(big_column(name, default="0") for name in COUNTERS),
    text_column("application", default=""),
    *(big_column(name, default="0") for name in HIDDEN_COLUMNS.values()),
    PrimaryKeyConstraint(
        "room_id", "hour", "owner_id", "organisation_id", "event_type", "application"
    ),
)
"""`owner_id`: the organisation that owned the room; `organisation_id`: the one that published, or
to whose subscription was delivered. `application`: that of the publisher or the subscription; empty
for none, and for what older versions counted. Rows stay when the room or the organisation is
deleted.
"""

activity_minutes: Final = Table(
    "activity_minutes",
    metadata,
    id_column("subject"),
    Column("minute", DateTime(timezone=True), nullable=False),
    *(big_column(name) for name in MINUTE_COUNTERS),
    Column("latencies", ARRAY(Integer), nullable=False),
    PrimaryKeyConstraint("subject", "minute"),
)
"""`subject`: a subscription, an organisation, or zeros for all; `latencies`: calls by bucket."""

usage_mark: Final = Table(
    "usage_mark",
    metadata,
    Column("one", Boolean, nullable=False, server_default="true"),
    text_column("system", null=True),
    big_column("counted_xid", default="0"),
    Column("since", DateTime(timezone=True), nullable=False, server_default=text("'-infinity'")),
    Column(
        "complete_until",
        DateTime(timezone=True),
        nullable=False,
        server_default=text("'-infinity'"),
    ),
    time_or_null("next_until"),
    big_column("next_xid", null=True),
    PrimaryKeyConstraint("one"),
)
"""One row: rows of the log of transactions below `counted_xid` are counted; `complete_until`: no
transaction that can still write an earlier time is open.
"""


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
    Index("analysis_rows_about", "subscriptions", "rooms", postgresql_using="gin"),
)
