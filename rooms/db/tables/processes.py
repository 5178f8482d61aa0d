"""Declare the tables of processes: log writers, members, leaders and leader-assigned partitions."""

from typing import Final

from sqlalchemy import (
    ARRAY,
    Boolean,
    Column,
    DateTime,
    Identity,
    Integer,
    PrimaryKeyConstraint,
    Table,
    Text,
)

from rooms.db.tables.columns import (
    big_column,
    flag_column,
    int_column,
    metadata,
    small_column,
    text_column,
    time_column,
)

writers: Final = Table(
    "writers",
    metadata,
    Column("id", Integer, Identity(always=True), nullable=False),
    text_column("kind"),
    text_column("host"),
    int_column("pid"),
    time_column("started_at"),
    text_column("version", null=True),
    PrimaryKeyConstraint("id"),
)

processes: Final = Table(
    "processes",
    metadata,
    text_column("name"),
    text_column("kind"),
    text_column("host"),
    int_column("pid"),
    time_column("since"),
    time_column("seen_at"),
    flag_column("stopped"),
    text_column("broker"),
    text_column("election"),
    text_column("magazines"),
    text_column("farm"),
    text_column("client"),
    Column("secret_keys", ARRAY(Text), nullable=True),
    PrimaryKeyConstraint("name"),
)

upkeep_marks: Final = Table(
    "upkeep_marks",
    metadata,
    text_column("name"),
    Column("at", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("name"),
)

write_probes: Final = Table(
    "write_probes",
    metadata,
    small_column("id"),
    time_column("at"),
    PrimaryKeyConstraint("id"),
)

due_buckets: Final = Table(
    "due_buckets",
    metadata,
    Column("one", Boolean, nullable=False, server_default="true"),
    int_column("count", default="8"),
    PrimaryKeyConstraint("one"),
)

election_members: Final = Table(
    "election_members",
    metadata,
    Column("id", Integer, Identity(always=True), nullable=False),
    text_column("name"),
    text_column("host"),
    int_column("pid"),
    text_column("process", null=True),
    time_column("since"),
    Column("until", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("id"),
)

election_partitions: Final = Table(
    "election_partitions",
    metadata,
    text_column("name"),
    int_column("member", null=True),
    big_column("assigned"),
    int_column("holder", null=True),
    big_column("epoch", default="0"),
    PrimaryKeyConstraint("name"),
)

election_terms: Final = Table(
    "election_terms",
    metadata,
    Column("one", Boolean, nullable=False, server_default="true"),
    big_column("epoch", default="0"),
    big_column("term", default="0"),
    text_column("leader", null=True),
    time_column("led_at"),
    PrimaryKeyConstraint("one"),
)
