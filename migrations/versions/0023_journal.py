"""Keep a journal of changes, chained by hash for each organisation.

Entries are only added. A trigger refuses to change or delete them; the task that applies the
retention says so for its own transaction.
"""

from alembic import op

revision = "0023"
down_revision = "0022"

STATEMENTS = (
    """
    CREATE TABLE journal (
        organisation_id uuid NOT NULL,
        seq int8 NOT NULL,
        id uuid NOT NULL,
        at timestamptz NOT NULL,
        actor_kind text NOT NULL,
        actor_id uuid,
        actor_name text NOT NULL,
        actor_organisation_id uuid,
        application text,
        source text,
        request_id text,
        action text NOT NULL,
        object text NOT NULL,
        before json,
        after json,
        outcome text NOT NULL,
        reason text,
        previous_hash bytea NOT NULL,
        hash bytea NOT NULL,
        PRIMARY KEY (organisation_id, seq)
    )
    """,
    "CREATE INDEX journal_at ON journal (organisation_id, at)",
    """
    CREATE TABLE journal_heads (
        organisation_id uuid PRIMARY KEY,
        seq int8 NOT NULL,
        previous_hash bytea NOT NULL,
        hash bytea NOT NULL,
        kept_from int8 NOT NULL DEFAULT 1
    )
    """,
    """
    CREATE FUNCTION journal_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF TG_OP = 'DELETE' AND current_setting('rooms.journal_retention', true) = 'on' THEN
            RETURN OLD;
        END IF;
        RAISE EXCEPTION 'the journal is append-only';
    END $$
    """,
    """
    CREATE TRIGGER journal_rows BEFORE UPDATE OR DELETE ON journal
        FOR EACH ROW EXECUTE FUNCTION journal_is_append_only()
    """,
    """
    CREATE TRIGGER journal_table BEFORE TRUNCATE ON journal
        FOR EACH STATEMENT EXECUTE FUNCTION journal_is_append_only()
    """,
)


def upgrade() -> None:
    """Create the tables, and the trigger that protects them."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Remove the journal with all its entries: the older schema has no place for it."""
    op.execute("DROP TABLE journal")
    op.execute("DROP FUNCTION journal_is_append_only()")
    op.execute("DROP TABLE journal_heads")
