"""Let a look at an awaited message read the ids that it needs, and find messages by their room."""

from alembic import op

from migrations.concurrent_indexes import build_index

revision = "0056"
down_revision = "0055"


def upgrade() -> None:
    """Store the ids of deliveries plainly, as `log_entries` does, and index what is due by room.

    A slice of a compressed value needs all that is before it. Messages of before stay compressed
    until they are completed.
    """
    build_index("operational_messages_room", "operational_messages (room_id, check_at)")
    op.execute("ALTER TABLE operational_messages ALTER COLUMN enqueued SET STORAGE EXTERNAL")


def downgrade() -> None:
    """Drop the index, and compress the ids of later messages again."""
    op.execute("ALTER TABLE operational_messages ALTER COLUMN enqueued SET STORAGE EXTENDED")
    op.execute("DROP INDEX operational_messages_room")
