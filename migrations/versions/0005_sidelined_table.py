"""List sidelined deliveries by subscription, with the slots of their magazine entries."""

# ruff: noqa: E501 - SQL statements keep their lines

from alembic import op

revision = "0005"
down_revision = "0004"

# A separate table, because an index on the state of `deliveries` would cost every settled delivery
# a HOT update. The statement that sidelines a delivery writes its row. A row means nothing once its
# delivery is no longer sidelined at its generation.
UP = """
ALTER TABLE deliveries ADD COLUMN shovels smallint NOT NULL DEFAULT 0;
ALTER TABLE subscriptions ADD COLUMN sideline_shards smallint;
ALTER TABLE jobs ADD COLUMN result jsonb;
CREATE TABLE sidelined (
    room_id integer NOT NULL,
    id uuid NOT NULL,
    subscription_id uuid NOT NULL,
    generation integer NOT NULL,
    since timestamptz NOT NULL DEFAULT now(),
    reason text NOT NULL,
    shard smallint,
    pointer bigint,
    PRIMARY KEY (room_id, id)
) WITH (fillfactor = 70);
CREATE INDEX sidelined_subscription ON sidelined (subscription_id, since, id);
CREATE INDEX subscriptions_sideline ON subscriptions (id) WHERE sideline_shards IS NOT NULL;
CREATE INDEX sidelined_unloaded ON sidelined (since) WHERE shard IS NULL;
INSERT INTO sidelined (room_id, id, subscription_id, generation, since, reason)
    SELECT room_id, id, subscription_id, generation, updated_at, coalesce(reason, 'attempts_exhausted')
    FROM deliveries WHERE state = 'sidelined';
"""
DOWN = """
DROP TABLE sidelined;
ALTER TABLE subscriptions DROP COLUMN sideline_shards;
ALTER TABLE jobs DROP COLUMN result;
ALTER TABLE deliveries DROP COLUMN shovels;
"""


def upgrade() -> None:
    """Create the table and the columns, with a row for everything that is sidelined already."""
    op.execute(UP)


def downgrade() -> None:
    """Drop them; the deliveries stay sidelined."""
    op.execute(DOWN)
