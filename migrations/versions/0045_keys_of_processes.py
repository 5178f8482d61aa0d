"""Record the secret keys that each process has."""

from alembic import op

revision = "0045"
down_revision = "0044"


def upgrade() -> None:
    """Add names of keys, the one that seals first; null: the process seals and opens nothing."""
    op.execute("ALTER TABLE processes ADD COLUMN secret_keys text[]")


def downgrade() -> None:
    """Drop them."""
    op.execute("ALTER TABLE processes DROP COLUMN secret_keys")
