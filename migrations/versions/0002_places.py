"""Places: work rows on their way to another broker, and those that wait beyond its horizon.

Where PostgreSQL is the broker these indexes stay empty and cost nothing: no row is of their kinds.
"""

from alembic import op

revision = "0002"
down_revision = "0001"

UP = """
CREATE INDEX outbox_to_send ON outbox (due_at) WHERE kind IN (2, 3);
CREATE INDEX outbox_later ON outbox (due_at) WHERE kind IN (6, 7);
"""
DOWN = """
DROP INDEX outbox_to_send;
DROP INDEX outbox_later;
"""


def upgrade() -> None:
    """Make them."""
    op.execute(UP)


def downgrade() -> None:
    """Drop them; rows in these places keep their kinds, which an older version leaves alone."""
    op.execute(DOWN)
