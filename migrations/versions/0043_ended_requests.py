"""Mark subscriptions that ended before their room's owner approved them, to delete them in time."""

from alembic import op
from sqlalchemy import text

from migrations.concurrent_indexes import build_index

revision = "0043"
down_revision = "0042"

_INDEXES = {
    "subscriptions_never_approved": "status_since",
    "subscriptions_ended_requests": "room_id, organisation_id",
}
_BATCH_ROWS = 5_000
_FIRST_KEY = {"room": -(2**31), "id": "00000000-0000-0000-0000-000000000000"}
# The history of one that was approved or granted has another status than these.
_MARK = text("""
WITH batch AS MATERIALIZED (
    SELECT room_id, id FROM subscriptions
    WHERE (room_id, id) > (CAST(:room AS int4), CAST(:id AS uuid))
    ORDER BY room_id, id LIMIT :rows
), marked AS (
    UPDATE subscriptions s SET never_approved = true FROM batch b
    WHERE s.room_id = b.room_id AND s.id = b.id AND NOT s.never_approved
        AND (s.status = 'rejected' OR s.status IN ('terminated', 'deleted') AND EXISTS (
            SELECT FROM subscription_history h
            WHERE h.room_id = s.room_id AND h.subscription_id = s.id AND h.status = 'pending'
        ) AND NOT EXISTS (
            SELECT FROM subscription_history h
            WHERE h.room_id = s.room_id AND h.subscription_id = s.id
                AND h.status NOT IN ('pending', 'rejected', 'terminated', 'deleted')
        ))
)
SELECT room_id AS room, CAST(id AS text) AS id FROM batch
ORDER BY batch.room_id DESC, batch.id DESC LIMIT 1
""")


def upgrade() -> None:
    """Mark them, and index the marked ones: by age, and by who asked for them.

    The lock that a column takes ends before the marking, which reads the history of each. Each
    batch of the marking is a transaction, and another try leaves out what is marked.
    """
    with op.get_context().autocommit_block():
        op.execute(
            "ALTER TABLE subscriptions"
            " ADD COLUMN IF NOT EXISTS never_approved boolean NOT NULL DEFAULT false"
        )
        _mark_ended()
    for name, columns in _INDEXES.items():
        build_index(name, f"subscriptions ({columns}) WHERE never_approved")


def _mark_ended() -> None:
    connection = op.get_bind()
    last = _FIRST_KEY
    while (row := connection.execute(_MARK, {**last, "rows": _BATCH_ROWS}).first()) is not None:
        last = {"room": row.room, "id": row.id}


def downgrade() -> None:
    """Keep them like others that ended."""
    op.execute("ALTER TABLE subscriptions DROP COLUMN never_approved")
