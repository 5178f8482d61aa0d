"""Separate organisations: own queue names, and a scope for the installation.

A queue's `name`, its key, names its magazines in their store and never changes. `display_name` is
the organisation's own name for it, if that is different. The table that readiness writes to
(`rooms/db/readiness.py`) is added, too.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from alembic import op

revision = "0021"
down_revision = "0020"

# `rooms dev` gives its key this organisation and name; tenants have organisations of their own.
GRANT = """
UPDATE api_keys k SET scopes = k.scopes || '{platform}' FROM organisations o
WHERE o.id = k.organisation_id AND o.name = 'default' AND k.name = 'rooms-dev' AND k.revoked_at IS NULL
    AND 'admin' = ANY (k.scopes) AND NOT 'platform' = ANY (k.scopes)
"""
# A key that may do nothing else has no meaning in the older schema.
WITHDRAW = """
UPDATE api_keys SET revoked_at = coalesce(revoked_at, now()) WHERE scopes = '{platform}';
UPDATE api_keys SET scopes = array_remove(scopes, 'platform') WHERE 'platform' = ANY (scopes);
"""


def upgrade() -> None:
    """Add the columns; queues keep their name in the store, so that no magazine is touched.

    The key that `make run` left in `ROOMS_DATA/api-key` gets the scope `platform`. Other keys get
    it by `rooms key create`.
    """
    op.execute("ALTER TABLE queues ADD COLUMN display_name text")
    op.execute("DROP INDEX queues_of_organisation")
    op.execute(
        "CREATE UNIQUE INDEX queues_of_organisation ON queues (organisation_id, coalesce(display_name, name))"
    )
    op.execute(GRANT)
    op.execute(
        "CREATE TABLE write_probes (id smallint PRIMARY KEY, at timestamptz NOT NULL DEFAULT now())"
    )


def downgrade() -> None:
    """Keep for each queue its name in the store, and remove `platform` from every key."""
    op.execute("DROP TABLE write_probes")
    op.execute(WITHDRAW)
    op.execute("DROP INDEX queues_of_organisation")
    op.execute("CREATE INDEX queues_of_organisation ON queues (organisation_id, name)")
    op.execute("ALTER TABLE queues DROP COLUMN display_name")
