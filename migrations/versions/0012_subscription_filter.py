"""Store a subscription's filter on the messages of its types."""

from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Add the column, null everywhere."""
    op.execute("ALTER TABLE subscriptions ADD COLUMN filter text")


def downgrade() -> None:
    """Drop it."""
    op.execute("ALTER TABLE subscriptions DROP COLUMN filter")
