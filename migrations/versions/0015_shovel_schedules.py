"""Store the intervals at which sidelines are shoveled automatically."""

from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Create the table, empty."""
    op.execute(
        """
        CREATE TABLE shovel_schedules (
            room_id integer NOT NULL,
            subscription_id uuid NOT NULL,
            interval_s integer NOT NULL,
            rate_per_s double precision,
            concurrency integer NOT NULL,
            max_shovels integer NOT NULL,
            next_at timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (room_id, subscription_id)
        )
        """
    )


def downgrade() -> None:
    """Drop it."""
    op.execute("DROP TABLE shovel_schedules")
