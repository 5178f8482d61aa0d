"""Make room for headers of subscriptions that are sealed like signing secrets.

A migration has no secret key. So the API and the workers seal what is in `headers` when they start
(`rooms.db.secret_rotation`); until then both are read.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from alembic import op

revision = "0024"
down_revision = "0023"

_NAMED = "substring({0} for 3) = '\\x726b31'::bytea"
"""The condition for a sealed text that begins with the mark and the name of its key: 11 bytes."""

UP = "ALTER TABLE subscriptions ADD COLUMN header_names text[] NOT NULL DEFAULT '{}', ADD COLUMN sealed_headers bytea"
DOWN = (
    f"""
    UPDATE subscriptions SET
        secret = CASE WHEN {_NAMED.format("secret")} THEN substring(secret from 12) ELSE secret END,
        previous_secret = CASE WHEN {_NAMED.format("previous_secret")} THEN substring(previous_secret from 12) ELSE previous_secret END
    WHERE {_NAMED.format("secret")} OR {_NAMED.format("previous_secret")}
    """,  # noqa: S608 - constants of this module
    """
    UPDATE subscriptions SET status = 'paused', status_reason = 'its headers were sealed, which this version cannot read: set them again, and resume it',
        status_since = now(), version = version + 1
    WHERE sealed_headers IS NOT NULL AND status = 'active'
    """,
    "ALTER TABLE subscriptions DROP COLUMN header_names, DROP COLUMN sealed_headers",
)


def upgrade() -> None:
    """Add the columns; the start of a process fills them."""
    op.execute(UP)


def downgrade() -> None:
    """Remove sealed headers: nothing here can open them, so their subscriptions are paused.

    Signing secrets lose the name of their key. The older version opens those of one key only:
    finish a rotation of the secret key before.
    """
    for statement in DOWN:
        op.execute(statement)
