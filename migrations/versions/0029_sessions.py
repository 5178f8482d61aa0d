"""Let people sign in: sessions are keys of a kind of their own, and links begin them."""

from alembic import op

revision = "0029"
down_revision = "0028"

STATEMENTS = (
    # A session is an API key that lives in a browser's cookie and ends by itself.
    "ALTER TABLE api_keys ADD COLUMN kind text NOT NULL DEFAULT 'key'",
    "ALTER TABLE api_keys ADD COLUMN parent_id uuid",
    "ALTER TABLE api_keys ADD COLUMN ends_at timestamptz",
    "CREATE INDEX api_keys_sessions ON api_keys (organisation_id, id) WHERE kind = 'session'",
    "CREATE INDEX api_keys_parent ON api_keys (parent_id) WHERE parent_id IS NOT NULL",
    """
    CREATE TABLE sign_in_links (
        token_hash bytea PRIMARY KEY,
        organisation_id uuid NOT NULL REFERENCES organisations (id),
        kind text NOT NULL,
        name text NOT NULL,
        scopes text[] NOT NULL,
        rooms int4[],
        subscriptions uuid[],
        application text,
        created_by uuid,
        created_at timestamptz NOT NULL DEFAULT now(),
        expires_at timestamptz NOT NULL,
        session_s int4 NOT NULL,
        ends_at timestamptz,
        used_at timestamptz
    )
    """,
    "CREATE INDEX sign_in_links_expires ON sign_in_links (expires_at)",
    "CREATE INDEX sign_in_links_organisation ON sign_in_links (organisation_id)",
)


def upgrade() -> None:
    """Add the columns and the table; every existing key stays what it is."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """End every session: the older schema would list them among the keys."""
    op.execute("DROP TABLE sign_in_links")
    op.execute(
        "UPDATE api_keys SET revoked_at = coalesce(revoked_at, now()) WHERE scopes = '{view}'"
    )
    op.execute("UPDATE api_keys SET scopes = array_remove(scopes, 'view')")
    op.execute("DELETE FROM api_keys WHERE kind <> 'key'")
    op.execute("ALTER TABLE api_keys DROP COLUMN ends_at")
    op.execute("ALTER TABLE api_keys DROP COLUMN parent_id")
    op.execute("ALTER TABLE api_keys DROP COLUMN kind")
