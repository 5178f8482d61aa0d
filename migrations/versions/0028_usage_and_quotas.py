"""Count usage by the hour, from the log."""

from alembic import op

revision = "0028"
down_revision = "0025"

STATEMENTS = (
    # A room's id, or an organisation's, stays here when its row is deleted: it was used.
    """
    CREATE TABLE usage_hours (
        room_id int4 NOT NULL,
        hour timestamptz NOT NULL,
        owner_id uuid NOT NULL,
        organisation_id uuid NOT NULL,
        event_type text NOT NULL,
        messages int8 NOT NULL DEFAULT 0,
        bytes int8 NOT NULL DEFAULT 0,
        deliveries int8 NOT NULL DEFAULT 0,
        attempts int8 NOT NULL DEFAULT 0,
        failed_attempts int8 NOT NULL DEFAULT 0,
        delivered int8 NOT NULL DEFAULT 0,
        sidelined int8 NOT NULL DEFAULT 0,
        expired int8 NOT NULL DEFAULT 0,
        cancelled int8 NOT NULL DEFAULT 0,
        dropped int8 NOT NULL DEFAULT 0,
        purged int8 NOT NULL DEFAULT 0,
        PRIMARY KEY (room_id, hour, owner_id, organisation_id, event_type)
    ) WITH (fillfactor = 80)
    """,
    "CREATE INDEX usage_hours_hour ON usage_hours (hour)",
    "CREATE INDEX usage_hours_organisation ON usage_hours (organisation_id, hour)",
    "CREATE INDEX usage_hours_owner ON usage_hours (owner_id, hour)",
    # How far the log is counted: one row.
    """
    CREATE TABLE usage_mark (
        one boolean PRIMARY KEY DEFAULT true CHECK (one),
        system text,
        counted_xid int8 NOT NULL DEFAULT 0,
        since timestamptz NOT NULL DEFAULT '-infinity',
        complete_until timestamptz NOT NULL DEFAULT '-infinity',
        next_until timestamptz,
        next_xid int8
    )
    """,
    "INSERT INTO usage_mark DEFAULT VALUES",
)


def upgrade() -> None:
    """Create the tables; the first run of the task counts what the log still has."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Remove what was counted: the older schema has no place for it."""
    op.execute("DROP TABLE usage_hours")
    op.execute("DROP TABLE usage_mark")
