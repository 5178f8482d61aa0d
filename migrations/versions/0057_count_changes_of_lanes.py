"""Count the versions of a subscription that changed only its lane, which callers do not see."""

from alembic import op

revision = "0057"
down_revision = "0056"


def upgrade() -> None:
    """Add the count. Workers of the former version do not raise it, so callers see their versions.

    A caller must then look again. It never approves what it has not seen.
    """
    op.execute("ALTER TABLE subscriptions ADD COLUMN lane_changes integer NOT NULL DEFAULT 0")


def downgrade() -> None:
    """Drop it: callers see every version again, which is later than the one that they saw."""
    op.execute("ALTER TABLE subscriptions DROP COLUMN lane_changes")
