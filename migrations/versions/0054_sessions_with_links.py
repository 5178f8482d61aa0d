"""Know which session made a link, which ends with it."""

from alembic import op

from migrations.concurrent_indexes import build_index

revision = "0054"
down_revision = "0053"


def upgrade() -> None:
    """Add the session of a link. Those of before are valid for a day at most."""
    with op.get_context().autocommit_block():
        op.execute("ALTER TABLE sign_in_links ADD COLUMN IF NOT EXISTS session_id uuid")
    build_index("sign_in_links_session", "sign_in_links (session_id) WHERE session_id IS NOT NULL")


def downgrade() -> None:
    """Forget the sessions."""
    op.execute("ALTER TABLE sign_in_links DROP COLUMN session_id")
