"""What another broker is to be sent is found by priority: of what is due, the highest goes first."""

from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    """The relay's index, by priority first. It is small: only what is still to be sent stands in it."""
    op.execute("DROP INDEX outbox_to_send")
    op.execute("CREATE INDEX outbox_to_send ON outbox (priority, due_at) WHERE kind IN (2, 3)")


def downgrade() -> None:
    """By due time alone."""
    op.execute("DROP INDEX outbox_to_send")
    op.execute("CREATE INDEX outbox_to_send ON outbox (due_at) WHERE kind IN (2, 3)")
