"""Say which version of Rooms a log writer runs."""

from alembic import op

revision = "0037"
down_revision = "0036"


def upgrade() -> None:
    """Add the column. Writers of an earlier version have none."""
    op.execute("ALTER TABLE writers ADD COLUMN version text")


def downgrade() -> None:
    """Drop the column."""
    op.execute("ALTER TABLE writers DROP COLUMN version")
