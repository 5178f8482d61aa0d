"""Index the open jobs that cancel what grants do not cover, and queue those that have failed."""

from alembic import op

revision = "0046"
down_revision = "0045"


def upgrade() -> None:
    """Index them by room. A subscription stays suspended until its job is done."""
    op.execute(
        "CREATE INDEX jobs_cancel_ungranted ON jobs (room_id)"
        " WHERE kind = 'cancel_ungranted' AND state IN ('queued', 'running')"
    )
    op.execute(
        "UPDATE jobs SET state = 'queued', error = NULL, finished_at = NULL, updated_at = now()"
        " WHERE kind = 'cancel_ungranted' AND state = 'failed'"
    )


def downgrade() -> None:
    """Drop the index."""
    op.execute("DROP INDEX jobs_cancel_ungranted")
