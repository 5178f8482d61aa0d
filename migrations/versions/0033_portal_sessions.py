"""Mark the sessions of portals, which open no other page."""

from alembic import op

revision = "0033"
down_revision = "0032"


def upgrade() -> None:
    """Add the mark; present sessions stay those of the console."""
    op.execute("ALTER TABLE api_keys ADD COLUMN portal boolean NOT NULL DEFAULT false")


def downgrade() -> None:
    """End the sessions of portals: the older code would let them into the console."""
    op.execute("UPDATE api_keys SET revoked_at = coalesce(revoked_at, now()) WHERE portal")
    op.execute("ALTER TABLE api_keys DROP COLUMN portal")
