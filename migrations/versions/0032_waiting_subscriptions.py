"""Find the subscriptions that wait for a decision by an index of their own."""

from alembic import op

revision = "0032"
down_revision = "0031"


def upgrade() -> None:
    """Index what waits: of a hundred thousand subscriptions, few do."""
    op.execute(
        "CREATE INDEX subscriptions_waiting ON subscriptions (id)"
        " WHERE status = 'pending' OR proposal IS NOT NULL"
    )


def downgrade() -> None:
    """Search all subscriptions again."""
    op.execute("DROP INDEX subscriptions_waiting")
