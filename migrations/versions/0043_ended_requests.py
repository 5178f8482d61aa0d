"""Mark subscriptions that ended before their room's owner approved them, to delete them in time."""

from alembic import op

revision = "0043"
down_revision = "0042"

# The history of one that was approved or granted has another status than these.
_MARK = """
UPDATE subscriptions s SET never_approved = true
WHERE s.status = 'rejected' OR s.status IN ('terminated', 'deleted') AND EXISTS (
    SELECT FROM subscription_history h
    WHERE h.room_id = s.room_id AND h.subscription_id = s.id AND h.status = 'pending'
) AND NOT EXISTS (
    SELECT FROM subscription_history h WHERE h.room_id = s.room_id AND h.subscription_id = s.id
        AND h.status NOT IN ('pending', 'rejected', 'terminated', 'deleted')
)
"""


def upgrade() -> None:
    """Mark them, and index the marked ones: by age, and by who asked for them."""
    op.execute("ALTER TABLE subscriptions ADD COLUMN never_approved boolean NOT NULL DEFAULT false")
    op.execute(_MARK)
    op.execute(
        "CREATE INDEX subscriptions_never_approved ON subscriptions (status_since)"
        " WHERE never_approved"
    )
    op.execute(
        "CREATE INDEX subscriptions_ended_requests ON subscriptions (room_id, organisation_id)"
        " WHERE never_approved"
    )


def downgrade() -> None:
    """Keep them like others that ended."""
    op.execute("ALTER TABLE subscriptions DROP COLUMN never_approved")
