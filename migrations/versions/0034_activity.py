"""Count the last hour by the minute, record who holds a lease, and find people by name."""

from alembic import op

revision = "0034"
down_revision = "0033"


def upgrade() -> None:
    """Create the table, the column and the indexes; counts and consumers begin now.

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
    op.execute(
        "CREATE INDEX journal_sign_ins ON journal (organisation_id, actor_name, at)"
        " WHERE action = 'sign_in'"
    )
    op.execute(
        "CREATE INDEX api_keys_people ON api_keys (organisation_id, name) WHERE kind = 'session'"
    )


def downgrade() -> None:
    """Remove the counts, which the log has, too, and the names of consumers."""
    op.execute("DROP INDEX api_keys_people")
    op.execute("DROP INDEX journal_sign_ins")
    op.execute("ALTER TABLE leases DROP COLUMN key_id")
    op.execute("DROP TABLE activity_minutes")
