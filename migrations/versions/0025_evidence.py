"""Store the keys of evidence: publishers' public keys, and the installation's own."""

from alembic import op

revision = "0025"
down_revision = "0024"

STATEMENTS = (
    # A revoked key stays: messages that it signed are verified with it.
    """
    CREATE TABLE signing_keys (
        organisation_id uuid NOT NULL REFERENCES organisations (id),
        kid text NOT NULL,
        name text NOT NULL,
        jwk json NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now(),
        revoked_at timestamptz,
        PRIMARY KEY (organisation_id, kid)
    )
    """,
    # The private part is deleted when the key is retired.
    """
    CREATE TABLE receipt_keys (
        kid text PRIMARY KEY,
        jwk json NOT NULL,
        encrypted_key bytea,
        created_at timestamptz NOT NULL DEFAULT now(),
        retired_at timestamptz
    )
    """,
    # The installation signs with one key at a time.
    "CREATE UNIQUE INDEX receipt_keys_current ON receipt_keys ((true)) WHERE retired_at IS NULL",
)


def upgrade() -> None:
    """Create the tables."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Remove them; receipts that were signed can no longer be verified by the service's keys."""
    op.execute("DROP TABLE signing_keys")
    op.execute("DROP TABLE receipt_keys")
