"""Find the subscriptions that wait for a decision by their room."""

from alembic import op

revision = "0038"
down_revision = "0037"

_WAITING = "WHERE status = 'pending' OR proposal IS NOT NULL"


def upgrade() -> None:
    """Index by room: by id only, a room's owner read what waits for all others, too."""
    op.execute("DROP INDEX subscriptions_waiting")
    op.execute(f"CREATE INDEX subscriptions_waiting ON subscriptions (room_id, id) {_WAITING}")


def downgrade() -> None:
    """Index by id only."""
    op.execute("DROP INDEX subscriptions_waiting")
    op.execute(f"CREATE INDEX subscriptions_waiting ON subscriptions (id) {_WAITING}")
