"""Bind a link to the text of the key that made it, so that a rotation ends it."""

from alembic import op

revision = "0044"
down_revision = "0043"


def upgrade() -> None:
    """Bind links, and sessions that may make some, to the present text of their key."""
    op.execute("ALTER TABLE sign_in_links ADD COLUMN maker_hash bytea")
    op.execute("ALTER TABLE api_keys ADD COLUMN parent_hash bytea")
    op.execute(
        "UPDATE sign_in_links l SET maker_hash = k.key_hash FROM api_keys k"
        " WHERE k.id = l.created_by"
    )
    op.execute(
        "UPDATE api_keys s SET parent_hash = k.key_hash FROM api_keys k"
        " WHERE s.kind = 'session' AND k.id = s.parent_id"
    )


def downgrade() -> None:
    """Let links end with their keys only."""
    op.execute("ALTER TABLE api_keys DROP COLUMN parent_hash")
    op.execute("ALTER TABLE sign_in_links DROP COLUMN maker_hash")
