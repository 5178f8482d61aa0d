"""Let rooms set the time-out and the ordering of their subscriptions, which may leave both open."""

# ruff: noqa: E501 - SQL statements keep their lines

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
    """Let subscriptions with the default value follow the room, which gets that value."""
    op.execute(UP)


def downgrade() -> None:
    """Store the effective values with each subscription again."""
    op.execute(DOWN)
