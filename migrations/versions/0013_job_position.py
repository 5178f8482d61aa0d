"""Store how far the walk of a job has come, and index the jobs that are open."""

from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Add both."""
    op.execute("ALTER TABLE jobs ADD COLUMN position jsonb")
    op.execute("CREATE INDEX jobs_open ON jobs (id) WHERE state IN ('queued', 'running')")


def downgrade() -> None:
    """Drop both; a walk starts again from its beginning."""
    op.execute("DROP INDEX jobs_open")
    op.execute("ALTER TABLE jobs DROP COLUMN position")
