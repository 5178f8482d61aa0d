"""Count usage by the hour, from the log, and limit what organisations and rooms use."""

from alembic import op

revision = "0028"
down_revision = "0027"

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
    "ALTER TABLE organisations ADD COLUMN quotas jsonb",
    "ALTER TABLE rooms ADD COLUMN quotas jsonb",
    # A row changes once a second for each process, and no index contains what changes.
    """
    CREATE TABLE quota_days (
        subject text NOT NULL,
        day date NOT NULL,
        messages int8 NOT NULL,
        bytes int8 NOT NULL,
        at timestamptz NOT NULL,
        PRIMARY KEY (subject, day)
    ) WITH (fillfactor = 50)
    """,
    """
    CREATE TABLE quota_stored (
        subject text PRIMARY KEY,
        messages int8 NOT NULL,
        is_full boolean NOT NULL,
        at timestamptz NOT NULL DEFAULT now()
    )
    """,
)


def upgrade() -> None:
    """Create the tables; the first run of the task counts what the log still has."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Remove what was counted, and every limit: the older schema has no place for them."""
    op.execute("DROP TABLE quota_stored")
    op.execute("DROP TABLE quota_days")
    op.execute("ALTER TABLE rooms DROP COLUMN quotas")
    op.execute("ALTER TABLE organisations DROP COLUMN quotas")
    op.execute("DROP TABLE usage_hours")
    op.execute("DROP TABLE usage_mark")
