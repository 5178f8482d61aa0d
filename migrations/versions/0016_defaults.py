"""What a room says for its subscriptions of time-outs and of order; a subscription may say nothing of either."""

from alembic import op

revision = "0016"
down_revision = "0015"

UP = """
ALTER TABLE rooms ADD COLUMN timeout_ms integer, ADD COLUMN ordered boolean NOT NULL DEFAULT false;
ALTER TABLE subscriptions ALTER COLUMN timeout_ms DROP NOT NULL, ALTER COLUMN ordered DROP NOT NULL,
    ALTER COLUMN ordered DROP DEFAULT;
UPDATE subscriptions SET timeout_ms = nullif(timeout_ms, 15000), ordered = nullif(ordered, false)
WHERE timeout_ms = 15000 OR NOT ordered;
"""
DOWN = """
UPDATE subscriptions s SET timeout_ms = coalesce(s.timeout_ms, r.timeout_ms, 15000), ordered = coalesce(s.ordered, r.ordered)
FROM rooms r WHERE r.id = s.room_id AND (s.timeout_ms IS NULL OR s.ordered IS NULL);
ALTER TABLE subscriptions ALTER COLUMN timeout_ms SET NOT NULL, ALTER COLUMN ordered SET DEFAULT false,
    ALTER COLUMN ordered SET NOT NULL;
ALTER TABLE rooms DROP COLUMN timeout_ms, DROP COLUMN ordered;
"""


def upgrade() -> None:
    """What stood for the default follows the room, which says what held before."""
    op.execute(UP)


def downgrade() -> None:
    """What holds for each subscription is its own again."""
    op.execute(DOWN)
