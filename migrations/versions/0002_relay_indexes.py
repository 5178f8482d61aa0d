"""Index outbox rows to send to another broker, and those scheduled beyond its lookahead.

With PostgreSQL as broker these indexes stay empty and cost nothing: there are no rows of these
kinds.
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
    """Create both indexes."""
    op.execute(UP)


def downgrade() -> None:
    """Drop them; rows keep their kinds, which an older version leaves as they are."""
    op.execute(DOWN)
