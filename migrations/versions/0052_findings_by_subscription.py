"""Find what the analysis says about a subscription or a room without reading all else."""

from alembic import op

from migrations.concurrent_indexes import build_index

revision = "0052"
down_revision = "0051"


def upgrade() -> None:
    """Index by what findings are about. An organisation may have millions of days of rollups."""
    build_index("analysis_rows_about", "analysis_rows USING gin (subscriptions, rooms)")


def downgrade() -> None:
    """Drop the index."""
    op.execute("DROP INDEX analysis_rows_about")
