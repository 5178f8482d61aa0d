"""Let a subscription override retry cap and jitter, shorten lifetimes, and start in the past."""

from alembic import op

revision = "0027"
down_revision = "0026"


def upgrade() -> None:
    """Add the columns, null everywhere: the room's values apply, and there is no history."""
    op.execute(
        "ALTER TABLE subscriptions ADD COLUMN delivery_max_delay_ms bigint,"
        " ADD COLUMN delivery_jitter double precision, ADD COLUMN message_expiration_ms bigint,"
        " ADD COLUMN start_at timestamptz"
    )


def downgrade() -> None:
    """Drop them; the room's values apply again."""
    op.execute(
        "ALTER TABLE subscriptions DROP COLUMN delivery_max_delay_ms, DROP COLUMN delivery_jitter,"
        " DROP COLUMN message_expiration_ms, DROP COLUMN start_at"
    )
