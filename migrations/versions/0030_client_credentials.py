"""Let a certificate or a trusted proxy identify a client: a credential without a text."""

from alembic import op

revision = "0030"
down_revision = "0029"

STATEMENTS = (
    "ALTER TABLE api_keys ALTER COLUMN key_hash DROP NOT NULL",
    """
    ALTER TABLE api_keys ADD CONSTRAINT api_keys_text
        CHECK ((key_hash IS NULL) = (kind = 'client'))
    """,
    # At most one for an organisation, and one for each application of it.
    """
    CREATE UNIQUE INDEX api_keys_clients ON api_keys (organisation_id, coalesce(application, ''))
        WHERE kind = 'client' AND revoked_at IS NULL
    """,
    # A look-up reads revoked ones, too: their application has no access then.
    """
    CREATE INDEX api_keys_client_applications ON api_keys (organisation_id, application)
        WHERE kind = 'client'
    """,
)


def upgrade() -> None:
    """Allow keys without a text, which only clients have."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Remove the credentials of clients: the older schema has only keys with a text."""
    op.execute("DROP INDEX api_keys_client_applications")
    op.execute("DROP INDEX api_keys_clients")
    op.execute("ALTER TABLE api_keys DROP CONSTRAINT api_keys_text")
    op.execute("DELETE FROM api_keys WHERE kind = 'client'")
    op.execute("ALTER TABLE api_keys ALTER COLUMN key_hash SET NOT NULL")
