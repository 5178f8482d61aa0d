"""Find what a caller's last pull got, however many leases others have in the room."""

from alembic import op

from migrations.concurrent_indexes import build_index

revision = "0051"
down_revision = "0050"


def upgrade() -> None:
    """Index the few leases that the next pull of their holder acknowledges."""
    build_index("leases_held", "leases (subscription_id) WHERE holder IS NOT NULL")


def downgrade() -> None:
    """Read the leases of the room."""
    op.execute("DROP INDEX leases_held")
