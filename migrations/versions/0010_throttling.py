"""Add throttle settings, the lane state that workers share, and operational endpoints."""

from alembic import op

revision = "0010"
down_revision = "0009"

SETTINGS = """
    ADD COLUMN max_concurrency integer,
    ADD COLUMN rate_per_s double precision,
    ADD COLUMN rate_burst integer,
    ADD COLUMN circuit_failures integer,
    ADD COLUMN circuit_window_ms bigint,
    ADD COLUMN circuit_open_ms bigint,
    ADD COLUMN drain_per_s double precision,
    ADD COLUMN disable_after_ms bigint
"""

# A row is created with the first state to share, so most subscriptions have none. Only the key is
# indexed: each change is a HOT update.
UP = f"""
ALTER TABLE subscriptions {SETTINGS}, ADD COLUMN operational boolean NOT NULL DEFAULT false;
ALTER TABLE rooms {SETTINGS}, ADD COLUMN operational_url text;
CREATE TABLE lanes (
    room_id integer NOT NULL,
    id uuid NOT NULL,
    circuit_open boolean NOT NULL DEFAULT false,
    circuit_since timestamptz,
    probe_at timestamptz,
    probe uuid,
    probe_generation integer,
    probe_attempt integer,
    probes integer NOT NULL DEFAULT 0,
    failing_since timestamptz,
    drained_until timestamptz NOT NULL DEFAULT '-infinity',
    spent_until timestamptz NOT NULL DEFAULT '-infinity',
    concurrency integer,
    concurrency_at timestamptz,
    PRIMARY KEY (room_id, id)
) WITH (fillfactor = 50);
DROP INDEX held_subscription;
CREATE INDEX held_subscription ON held (subscription_id, reason, id);
"""


def upgrade() -> None:
    """Add them."""
    op.execute(UP)


def downgrade() -> None:
    """Drop them."""
    op.execute("DROP TABLE lanes; DROP INDEX held_subscription")
    op.execute("CREATE INDEX held_subscription ON held (subscription_id, id)")
    names = [line.split()[2] for line in SETTINGS.strip().splitlines()]
    drops = ", ".join(f"DROP COLUMN {name}" for name in names)
    op.execute(f"ALTER TABLE rooms {drops}, DROP COLUMN operational_url")
    op.execute(f"ALTER TABLE subscriptions {drops}, DROP COLUMN operational")
