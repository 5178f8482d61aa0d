"""Create the tables of magazines in PostgreSQL, and the records of handler queues."""

# ruff: noqa: E501 - SQL statements keep their lines

from alembic import op

revision = "0006"
down_revision = "0005"

# A slot's row is written when it is loaded, once more when it is fired (on its own page: HOT), and
# deleted. Pointers are a few rows that change all the time. As for the other work tables, vacuum
# runs by a fixed number of dead rows.
MAGAZINES = """
CREATE TABLE magazines (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    shards integer NOT NULL,
    expires boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE magazine_pointers (
    magazine_id integer NOT NULL,
    kind smallint NOT NULL,
    shard smallint NOT NULL,
    pointer bigint NOT NULL DEFAULT 0,
    epoch bigint NOT NULL DEFAULT 0,
    loaded bigint NOT NULL DEFAULT 0,
    fired bigint NOT NULL DEFAULT 0,
    deleted bigint NOT NULL DEFAULT 0,
    reloaded bigint NOT NULL DEFAULT 0,
    swept bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (magazine_id, kind, shard)
) WITH (fillfactor = 50, {vacuum});
CREATE TABLE magazine_entries (
    pointer bigint NOT NULL,
    loaded_at timestamptz NOT NULL DEFAULT now(),
    fire_ts timestamptz,
    expires_at timestamptz,
    magazine_id integer NOT NULL,
    generation integer NOT NULL DEFAULT 0,
    shovels integer NOT NULL DEFAULT 0,
    shard smallint NOT NULL,
    id text NOT NULL,
    reason text,
    detail text,
    body bytea NOT NULL,
    PRIMARY KEY (magazine_id, shard, pointer)
) WITH (fillfactor = 50, {vacuum});
CREATE TABLE handler_queues (
    name text PRIMARY KEY,
    handler_type text NOT NULL,
    created_at timestamptz NOT NULL,
    active boolean NOT NULL DEFAULT true,
    shards integer NOT NULL,
    queue_expiry_s integer,
    message_expiry_s integer,
    concurrency integer NOT NULL,
    shovel_concurrency integer NOT NULL,
    shovel_interval_s integer NOT NULL,
    sweep_duration_s integer NOT NULL,
    max_batch integer NOT NULL,
    max_wait_s integer NOT NULL
);
""".format(
    vacuum=(
        "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0, "
        "autovacuum_vacuum_insert_threshold = -1, autovacuum_analyze_threshold = 100000000"
    )
)


def upgrade() -> None:
    """Create the tables, empty."""
    op.execute(MAGAZINES)


def downgrade() -> None:
    """Drop them: entries of handler queues are lost.

    A subscription's sideline is in its deliveries.
    """
    op.execute("DROP TABLE magazine_entries, magazine_pointers, magazines, handler_queues")
