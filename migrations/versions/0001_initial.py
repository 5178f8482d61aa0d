"""Create the initial schema.

It has rooms, subscriptions, messages, deliveries, their work tables and their log.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from alembic import op

revision = "0001"
down_revision = None

SMALL = """
CREATE TABLE organisations (
    id uuid PRIMARY KEY,
    name text NOT NULL UNIQUE,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE api_keys (
    id uuid PRIMARY KEY,
    organisation_id uuid NOT NULL REFERENCES organisations (id),
    name text NOT NULL,
    key_hash bytea NOT NULL UNIQUE,
    scopes text[] NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    revoked_at timestamptz
);
CREATE TABLE rooms (
    id integer PRIMARY KEY,
    organisation_id uuid NOT NULL REFERENCES organisations (id),
    name text NOT NULL,
    description text,
    message_expiration_ms bigint,
    delivery_delay_ms bigint NOT NULL,
    delivery_delay_multiplier double precision NOT NULL,
    delivery_attempts integer NOT NULL,
    delivery_max_delay_ms bigint,
    delivery_jitter double precision NOT NULL DEFAULT 0,
    plan_version bigint NOT NULL DEFAULT 1,
    deleting boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (organisation_id, name)
) WITH (fillfactor = 70);
CREATE TABLE jobs (
    id uuid PRIMARY KEY,
    organisation_id uuid NOT NULL REFERENCES organisations (id),
    room_id integer,
    kind text NOT NULL,
    arguments jsonb NOT NULL DEFAULT '{}',
    state text NOT NULL DEFAULT 'queued',
    done bigint NOT NULL DEFAULT 0,
    total bigint,
    error text,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz
);
CREATE TABLE writers (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind text NOT NULL,
    host text NOT NULL,
    pid integer NOT NULL,
    started_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE upkeep_marks (
    name text PRIMARY KEY,
    at timestamptz NOT NULL
);
"""

OF_A_ROOM = """
CREATE TABLE event_types (
    room_id integer NOT NULL,
    id uuid NOT NULL,
    name text NOT NULL,
    latest_version integer NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (room_id, id),
    UNIQUE (room_id, name)
);
CREATE TABLE event_type_versions (
    room_id integer NOT NULL,
    id uuid NOT NULL,
    event_type_id uuid NOT NULL,
    version integer NOT NULL,
    schema jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (room_id, id),
    UNIQUE (room_id, event_type_id, version)
);
CREATE TABLE subscriptions (
    room_id integer NOT NULL,
    id uuid NOT NULL,
    name text NOT NULL,
    type text NOT NULL,
    event_types jsonb,
    push_url text,
    delivery_delay_ms bigint,
    delivery_delay_multiplier double precision,
    delivery_attempts integer,
    headers jsonb NOT NULL DEFAULT '{}',
    terminal_statuses integer[] NOT NULL DEFAULT '{}',
    ignorable_statuses integer[] NOT NULL DEFAULT '{}',
    timeout_ms integer NOT NULL,
    max_receives integer,
    cloud_events boolean NOT NULL DEFAULT false,
    secret bytea,
    previous_secret bytea,
    previous_secret_until timestamptz,
    status text NOT NULL DEFAULT 'active',
    status_reason text,
    status_since timestamptz NOT NULL DEFAULT now(),
    version integer NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (room_id, id)
);
CREATE UNIQUE INDEX subscriptions_name ON subscriptions (name, room_id) WHERE status <> 'deleted';
CREATE TABLE idempotency_keys (
    room_id integer NOT NULL,
    key text NOT NULL,
    message_id uuid NOT NULL,
    request_hash bytea NOT NULL,
    answer bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (room_id, key)
);
CREATE INDEX idempotency_keys_age ON idempotency_keys USING brin (created_at);
"""

# No second index of a table begins with room_id. Hot statements find rows by (room_id, id), and
# their plans are made while a day's partitions are still empty. On an empty table any index that
# begins alike looks as good as the primary key.
GROWING = """
CREATE TYPE delivery_state AS ENUM (
    'scheduled', 'queued', 'held', 'leased', 'sidelined', 'delivered', 'expired', 'cancelled', 'dropped', 'purged'
);
CREATE TABLE messages (
    room_id integer NOT NULL,
    id uuid NOT NULL,
    event_type text NOT NULL,
    event_version integer NOT NULL,
    priority smallint NOT NULL,
    fanout integer NOT NULL,
    published_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz,
    publisher_id uuid,
    correlation_id text NOT NULL,
    ordering_key text,
    headers bytea,
    payload bytea NOT NULL,
    PRIMARY KEY (room_id, id)
) PARTITION BY RANGE (id);
CREATE TABLE deliveries (
    room_id integer NOT NULL,
    id uuid NOT NULL,
    message_id uuid NOT NULL,
    subscription_id uuid NOT NULL,
    state delivery_state NOT NULL,
    generation integer NOT NULL DEFAULT 0,
    attempt integer NOT NULL DEFAULT 0,
    attempts integer NOT NULL DEFAULT 0,
    last_status smallint,
    due_at timestamptz,
    expires_at timestamptz,
    updated_at timestamptz NOT NULL DEFAULT now(),
    reason text,
    last_error text,
    PRIMARY KEY (room_id, id)
) PARTITION BY RANGE (id);
CREATE INDEX deliveries_subscription ON deliveries (subscription_id, id);
CREATE INDEX deliveries_expiry ON deliveries (expires_at) WHERE expires_at IS NOT NULL;
CREATE TABLE delivery_log (
    room_id integer NOT NULL,
    message_id uuid NOT NULL,
    writer_id integer NOT NULL,
    writer_seq bigint NOT NULL,
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    ts timestamptz NOT NULL DEFAULT now(),
    kind text NOT NULL,
    subscription_id uuid,
    delivery_id uuid,
    generation integer,
    attempt integer,
    event_version integer,
    fanout integer,
    payload_bytes integer,
    policy_version integer,
    delay_ms bigint,
    latency_ms real,
    worker integer,
    http_status smallint,
    schema_version smallint NOT NULL DEFAULT 1,
    correlation_id text,
    event_type text,
    target_host text,
    worker_host text,
    error_class text,
    detail text,
    answer_head bytea,
    PRIMARY KEY (room_id, message_id, writer_id, writer_seq)
) PARTITION BY RANGE (message_id);
CREATE TABLE messages_rest PARTITION OF messages DEFAULT;
CREATE TABLE deliveries_rest PARTITION OF deliveries DEFAULT WITH (fillfactor = 50);
CREATE TABLE delivery_log_rest PARTITION OF delivery_log DEFAULT;
CREATE VIEW published_messages AS
    SELECT room_id, message_id, subscription_id, delivery_id, kind, generation, attempt, delay_ms, correlation_id, ts
    FROM delivery_log
    WHERE kind IN ('enqueued', 'retry_scheduled', 'released', 'lease_ended', 'nacked', 'shoveled', 'restored', 'replayed');
"""

# The work tables are small and hot. Half-empty pages keep a claim's update on its page (HOT).
# Vacuum runs by a fixed number of dead rows, at full speed, because a share of a table that is
# mostly empty says nothing. Their statistics are not needed: the plans are made once and must not
# depend on them.
WORK = """
CREATE TABLE outbox (
    room_id integer NOT NULL,
    id uuid NOT NULL,
    message_id uuid NOT NULL,
    subscription_id uuid NOT NULL,
    kind smallint NOT NULL,
    priority smallint NOT NULL,
    generation integer NOT NULL,
    attempt integer NOT NULL,
    delay_ms bigint NOT NULL DEFAULT 0,
    due_at timestamptz NOT NULL,
    expires_at timestamptz,
    claimed_until timestamptz NOT NULL DEFAULT '-infinity',
    worker integer,
    PRIMARY KEY (room_id, id)
) WITH (fillfactor = 50, {vacuum});
CREATE INDEX outbox_push ON outbox (priority, due_at) WHERE kind = 0;
CREATE INDEX outbox_pull ON outbox (subscription_id, priority, due_at) WHERE kind = 1;
CREATE TABLE held (
    room_id integer NOT NULL,
    id uuid NOT NULL,
    subscription_id uuid NOT NULL,
    priority smallint NOT NULL,
    delay_ms bigint NOT NULL,
    since timestamptz NOT NULL DEFAULT now(),
    reason text NOT NULL,
    PRIMARY KEY (room_id, id)
) WITH ({vacuum});
CREATE INDEX held_subscription ON held (subscription_id, id);
CREATE TABLE leases (
    room_id integer NOT NULL,
    id uuid NOT NULL,
    subscription_id uuid NOT NULL,
    generation integer NOT NULL,
    until timestamptz NOT NULL,
    PRIMARY KEY (room_id, id)
) WITH ({vacuum});
CREATE INDEX leases_until ON leases (until);
""".format(
    vacuum=(
        "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0, "
        "autovacuum_vacuum_insert_threshold = -1, autovacuum_analyze_threshold = 100000000"
    )
)


def upgrade() -> None:
    """Create everything; `rooms.db.retention.partitions` creates the partitions of days."""
    for part in (SMALL, OF_A_ROOM, GROWING, WORK):
        op.execute(part)


def downgrade() -> None:
    """Refuse: there is no earlier schema, and a migration must never drop messages."""
    raise RuntimeError("revision 0001 has no predecessor; drop the database to start anew")
