"""Index what must be sent to another broker by priority: the highest goes first."""

from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    """Create the relay's index with the priority first.

    It is small: it has only rows that are still to send.
    """
    op.execute("DROP INDEX outbox_to_send")
    op.execute("CREATE INDEX outbox_to_send ON outbox (priority, due_at) WHERE kind IN (2, 3)")


def downgrade() -> None:
    """Restore the index by due time."""
    op.execute("DROP INDEX outbox_to_send")
    op.execute("CREATE INDEX outbox_to_send ON outbox (due_at) WHERE kind IN (2, 3)")
