"""How many claims of a copy running ended with whoever had it."""

from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    """Null where there was none, as nearly everywhere: it takes no room then, and no row is rewritten."""
    op.execute("ALTER TABLE outbox ADD COLUMN abandoned smallint")
    op.execute("ALTER TABLE held ADD COLUMN abandoned smallint")


def downgrade() -> None:
    """Without it."""
    op.execute("ALTER TABLE held DROP COLUMN abandoned")
    op.execute("ALTER TABLE outbox DROP COLUMN abandoned")
