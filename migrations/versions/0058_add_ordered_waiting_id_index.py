"""Find what waits for its turn by its delivery, to let it leave the line when that ends."""

from alembic import op

from migrations.concurrent_indexes import build_index

revision = "0058"
down_revision = "0057"


def upgrade() -> None:
    """Index by delivery. What ended before goes when its key goes on, as it would have."""
    build_index("ordered_waiting_id", "ordered_waiting (id)")


def downgrade() -> None:
    """Drop it: what ends while it waits stays until its key goes on."""
    op.execute("DROP INDEX ordered_waiting_id")
