"""Mark subscriptions that ended before their room's owner approved them, to delete them in time."""

from alembic import op

from migrations.concurrent_indexes import build_index

revision = "0043"
down_revision = "0042"

_INDEXES = {
    "subscriptions_never_approved": "status_since",
    "subscriptions_ended_requests": "room_id, organisation_id",
}
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
    """Mark them, and index the marked ones: by age, and by who asked for them.

    The lock that a column takes ends before the marking, which reads the history of each.
    """
    with op.get_context().autocommit_block():
        op.execute(
            "ALTER TABLE subscriptions"
            " ADD COLUMN IF NOT EXISTS never_approved boolean NOT NULL DEFAULT false"
        )
    op.execute(_MARK)
    for name, columns in _INDEXES.items():
        build_index(name, f"subscriptions ({columns}) WHERE never_approved")


def downgrade() -> None:
    """Keep them like others that ended."""
    op.execute("ALTER TABLE subscriptions DROP COLUMN never_approved")
