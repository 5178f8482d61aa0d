"""Store the head of each ordering key, and the deliveries that wait behind it."""

# ruff: noqa: E501 - SQL statements keep their lines

from alembic import op

revision = "0014"
down_revision = "0013"

# Like the other work tables: narrow, empty when idle, vacuumed by a fixed number of dead rows.
_VACUUM = (
    "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0, "
    "autovacuum_vacuum_insert_threshold = -1, autovacuum_analyze_threshold = 100000000"
)


def upgrade() -> None:
    """Create both tables, empty; no subscription is ordered yet."""
    op.execute(
        f"""
        ALTER TABLE subscriptions ADD COLUMN ordered boolean NOT NULL DEFAULT false;
        CREATE TABLE ordered_keys (
            room_id integer NOT NULL,
            subscription_id uuid NOT NULL,
            key bytea NOT NULL,
            tail bigint NOT NULL,
            head bigint NOT NULL,
            head_id uuid NOT NULL,
            since timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (room_id, subscription_id, key)
        ) WITH (fillfactor = 50, {_VACUUM});
        CREATE INDEX ordered_keys_head ON ordered_keys (head_id);
        CREATE TABLE ordered_waiting (
            room_id integer NOT NULL,
            subscription_id uuid NOT NULL,
            key bytea NOT NULL,
            position bigint NOT NULL,
            id uuid NOT NULL,
            PRIMARY KEY (room_id, subscription_id, key, position)
        ) WITH ({_VACUUM});
        """
    )


def downgrade() -> None:
    """Release the deliveries that wait for their turn, and drop everything."""
    op.execute("UPDATE held SET reason = 'saturated' WHERE reason = 'order'")
    op.execute(
        "UPDATE deliveries SET reason = 'saturated' WHERE state = 'held' AND reason = 'order'"
    )
    op.execute(
        "DROP TABLE ordered_waiting; DROP TABLE ordered_keys; ALTER TABLE subscriptions DROP COLUMN ordered"
    )
