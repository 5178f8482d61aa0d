"""Count the last hour of each subscription by the minute, and record who holds a lease."""

from alembic import op

revision = "0034"
down_revision = "0032"


def upgrade() -> None:
    """Create the table and the column: they fill with what happens from now on.

    A row changes each time its minute is counted, and no index contains what changes. `subject`: a
    subscription, an organisation, or zeros for the installation.
    """
    op.execute(
        """
        CREATE TABLE activity_minutes (
            subject uuid NOT NULL,
            minute timestamptz NOT NULL,
            deliveries int8 NOT NULL,
            delivered int8 NOT NULL,
            failed int8 NOT NULL,
            sidelined int8 NOT NULL,
            expired int8 NOT NULL,
            latencies int4[] NOT NULL,
            PRIMARY KEY (subject, minute)
        ) WITH (fillfactor = 70)
        """
    )
    op.execute("CREATE INDEX activity_minutes_minute ON activity_minutes (minute)")
    op.execute("ALTER TABLE leases ADD COLUMN key_id uuid")


def downgrade() -> None:
    """Remove the counts, which the log has, too, and the names of consumers."""
    op.execute("ALTER TABLE leases DROP COLUMN key_id")
    op.execute("DROP TABLE activity_minutes")
