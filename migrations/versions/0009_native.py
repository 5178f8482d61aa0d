"""Subscriptions whose queue is read at the broker itself, and the state in which what they got ends."""

from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """A transaction of its own for each revision: the new value is committed before anything uses it."""
    op.execute("ALTER TYPE delivery_state ADD VALUE 'handed_over'")
    op.execute("ALTER TABLE subscriptions ADD COLUMN native_password text")
    op.execute("CREATE INDEX subscriptions_native ON subscriptions (id) WHERE native_password IS NOT NULL")


def downgrade() -> None:
    """The column goes, and its index; a value of an ENUM cannot be taken away, and does no harm."""
    op.execute("ALTER TABLE subscriptions DROP COLUMN native_password")
