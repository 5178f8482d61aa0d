"""Count the successive claims of a copy that ended with the death of their worker."""

from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    """Add the columns, null where the count is 0, as nearly everywhere: so no row is rewritten."""
    op.execute("ALTER TABLE outbox ADD COLUMN abandoned smallint")
    op.execute("ALTER TABLE held ADD COLUMN abandoned smallint")


def downgrade() -> None:
    """Drop them."""
    op.execute("ALTER TABLE held DROP COLUMN abandoned")
    op.execute("ALTER TABLE outbox DROP COLUMN abandoned")
