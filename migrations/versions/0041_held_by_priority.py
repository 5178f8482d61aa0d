"""Release held deliveries by priority."""

from alembic import op

revision = "0041"
down_revision = "0040"


def upgrade() -> None:
    """Index by priority before the id: a release reads as many rows as it takes, as before."""
    op.execute("DROP INDEX held_subscription")
    op.execute(
        "CREATE INDEX held_subscription ON held (subscription_id, reason, priority DESC, id)"
    )


def downgrade() -> None:
    """Index by age only."""
    op.execute("DROP INDEX held_subscription")
    op.execute("CREATE INDEX held_subscription ON held (subscription_id, reason, id)")
