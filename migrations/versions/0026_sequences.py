"""Number the deliveries of each subscription and ordering key."""

from alembic import op

revision = "0026"
down_revision = "0025"


def upgrade() -> None:
    """Add the column, null where a delivery has no number: so no row is rewritten."""
    op.execute("ALTER TABLE deliveries ADD COLUMN sequence bigint")


def downgrade() -> None:
    """Drop it."""
    op.execute("ALTER TABLE deliveries DROP COLUMN sequence")
