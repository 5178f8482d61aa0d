"""Record of an analysis which hours lack segments of the log, and why."""

from alembic import op

revision = "0035"
down_revision = "0034"


def upgrade() -> None:
    """Add the list; analyses so far have named none."""
    op.execute("ALTER TABLE analysis_runs ADD COLUMN set_aside jsonb NOT NULL DEFAULT '[]'")


def downgrade() -> None:
    """Remove the list."""
    op.execute("ALTER TABLE analysis_runs DROP COLUMN set_aside")
