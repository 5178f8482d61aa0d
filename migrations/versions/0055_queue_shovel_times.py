"""Keep the time of a handler queue's next shovel over changes of the process that runs it."""

from alembic import op

revision = "0055"
down_revision = "0054"


def upgrade() -> None:
    """Add the column. Without a time, the interval starts when a process first sees the queue."""
    op.execute("ALTER TABLE queues ADD COLUMN shovel_next_at timestamptz")


def downgrade() -> None:
    """Drop it: intervals start again in each process."""
    op.execute("ALTER TABLE queues DROP COLUMN shovel_next_at")
