"""Mark subscriptions whose queue is read at the broker itself, and add the state `handed_over`."""

from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Add the column and the state.

    Each revision is its own transaction, so the value is committed before it is used.
    """
    op.execute("ALTER TYPE delivery_state ADD VALUE 'handed_over'")
    op.execute("ALTER TABLE subscriptions ADD COLUMN native_password text")
    op.execute(
        "CREATE INDEX subscriptions_native ON subscriptions (id) WHERE native_password IS NOT NULL"
    )


def downgrade() -> None:
    """Drop the column and its index; a value of an ENUM cannot be dropped, and does no harm."""
    op.execute("ALTER TABLE subscriptions DROP COLUMN native_password")
