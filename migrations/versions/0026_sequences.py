"""Number the deliveries of each ordering key of an ordered subscription."""

from alembic import op

revision = "0026"
down_revision = "0025"

STATEMENTS = (
    # Null where a delivery has no number: so no row is rewritten.
    "ALTER TABLE deliveries ADD COLUMN sequence bigint",
    # Its rows are updated in place by every publish with an ordering key.
    """
    CREATE TABLE sequences (
        room_id integer NOT NULL,
        subscription_id uuid NOT NULL,
        key bytea NOT NULL,
        last bigint NOT NULL,
        updated_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (room_id, subscription_id, key)
    ) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05,
        autovacuum_vacuum_cost_delay = 0)
    """,
)


def upgrade() -> None:
    """Begin to number; deliveries of before have no number."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Forget all numbers."""
    op.execute("DROP TABLE sequences")
    op.execute("ALTER TABLE deliveries DROP COLUMN sequence")
