"""Count apart what a subscriber in another organisation's room may not know of."""

from alembic import op

revision = "0050"
down_revision = "0049"

_COLUMNS = ("kept_deliveries", "kept_expired", "kept_cancelled")


def upgrade() -> None:
    """Add the columns; what earlier versions counted is known to all who saw it then."""
    added = ", ".join(f"ADD COLUMN {name} int8 NOT NULL DEFAULT 0" for name in _COLUMNS)
    op.execute(f"ALTER TABLE usage_hours {added}")


def downgrade() -> None:
    """Drop the columns: the older version shows these counts to all who see the rest."""
    dropped = ", ".join(f"DROP COLUMN {name}" for name in _COLUMNS)
    op.execute(f"ALTER TABLE usage_hours {dropped}")
