"""Index what is due to PULL while another broker carries it.

A poll uses it to decide whether to wait for a copy.
"""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Create the index."""
    op.execute(
        "CREATE INDEX outbox_pull_away ON outbox (subscription_id, due_at) WHERE kind IN (3, 5)"
    )


def downgrade() -> None:
    """Drop it."""
    op.execute("DROP INDEX outbox_pull_away")
