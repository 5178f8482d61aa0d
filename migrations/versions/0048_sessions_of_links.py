"""Say of which portal link a session is, so that the live ones of a link have a bound."""

from alembic import op

revision = "0048"
down_revision = "0047"


def upgrade() -> None:
    """Name the link of further sessions; present ones end within 12 hours and do not count."""
    op.execute("ALTER TABLE api_keys ADD COLUMN link_hash bytea")
    op.execute("CREATE INDEX api_keys_link ON api_keys (link_hash) WHERE link_hash IS NOT NULL")


def downgrade() -> None:
    """Forget the links of sessions."""
    op.execute("ALTER TABLE api_keys DROP COLUMN link_hash")
