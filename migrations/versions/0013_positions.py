"""How far the walk of a job has come, and an index of the jobs that are open."""

from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Add both."""
    op.execute("ALTER TABLE jobs ADD COLUMN position jsonb")
    op.execute("CREATE INDEX jobs_open ON jobs (id) WHERE state IN ('queued', 'running')")


def downgrade() -> None:
    """Take both away; a walk begins anew."""
    op.execute("DROP INDEX jobs_open")
    op.execute("ALTER TABLE jobs DROP COLUMN position")
