"""Count the last hour by the minute, record who holds a lease, and find people by name."""

from alembic import op

from migrations.concurrent_indexes import build_index

revision = "0034"
down_revision = "0033"


def upgrade() -> None:
    """Create the table, the column and the indexes; counts and consumers begin now.

    A row changes each time its minute is counted, and no index contains what changes. `subject`: a
    subscription, an organisation, or zeros for the installation. The indexes come first, because
    the new column locks the table of leases until the end.
    """
    build_index(
        "journal_sign_ins",
        "journal (organisation_id, actor_name, at) WHERE action = 'sign_in'",
    )
    build_index("api_keys_people", "api_keys (organisation_id, name) WHERE kind = 'session'")
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
    op.execute("DROP INDEX api_keys_people")
    op.execute("DROP INDEX journal_sign_ins")
    op.execute("ALTER TABLE leases DROP COLUMN key_id")
    op.execute("DROP TABLE activity_minutes")
