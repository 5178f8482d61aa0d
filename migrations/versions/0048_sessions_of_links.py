"""Say of which portal link a session is, so that the live ones of a link have a bound."""

from alembic import op

from migrations.concurrent_indexes import build_index

revision = "0048"
down_revision = "0047"


def upgrade() -> None:
    """Name the link of further sessions; present ones end within 12 hours and do not count."""
    with op.get_context().autocommit_block():
        op.execute("ALTER TABLE api_keys ADD COLUMN IF NOT EXISTS link_hash bytea")
    build_index(
        "api_keys_link",
        "api_keys (link_hash, expires_at) WHERE link_hash IS NOT NULL AND revoked_at IS NULL",
    )


def downgrade() -> None:
    """Forget the links of sessions."""
    op.execute("ALTER TABLE api_keys DROP COLUMN link_hash")
