"""Forget why a subscription was approved or reinstated: with a reason, an active one is failing."""

from alembic import op

revision = "0053"
down_revision = "0052"


def upgrade() -> None:
    """Leave the reasons of what cannot be served, which workers write."""
    op.execute(
        "UPDATE subscriptions SET status_reason = NULL WHERE status = 'active'"
        " AND status_reason IS NOT NULL AND status_reason NOT LIKE 'its deliveries are held: %'"
    )


def downgrade() -> None:
    """Do nothing: the history has these reasons."""
