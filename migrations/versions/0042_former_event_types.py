"""Remember former event types of subscriptions by grant, and since when rooms ask no approval."""

from alembic import op

revision = "0042"
down_revision = "0041"


def upgrade() -> None:
    """Add both. What is held where a grant was lost may be of any event type."""
    op.execute("ALTER TABLE subscriptions ADD COLUMN former_types text[] NOT NULL DEFAULT '{}'")
    op.execute(
        "UPDATE subscriptions SET former_types = '{*}'"
        " WHERE 'grant' = ANY (suspended_by) AND NOT operational"
    )
    op.execute("ALTER TABLE rooms ADD COLUMN reapproval_ended jsonb NOT NULL DEFAULT '{}'")


def downgrade() -> None:
    """Remove both."""
    op.execute("ALTER TABLE subscriptions DROP COLUMN former_types")
    op.execute("ALTER TABLE rooms DROP COLUMN reapproval_ended")
