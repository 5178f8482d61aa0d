"""Let organisations share rooms: grants, subscriptions of others, narrow keys.

What exists keeps working as it was. Every room is private, every subscription belongs to the
organisation of its room, and every key may do in its organisation what its scopes say.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from alembic import op

revision = "0022"
down_revision = "0021"

STATEMENTS = (
    """
    ALTER TABLE organisations
        ADD COLUMN member_id text UNIQUE,
        ADD COLUMN contact text,
        ADD COLUMN status text NOT NULL DEFAULT 'active',
        ADD COLUMN status_reason text,
        ADD COLUMN status_since timestamptz NOT NULL DEFAULT now(),
        ADD COLUMN updated_at timestamptz NOT NULL DEFAULT now()
    """,
    """
    ALTER TABLE api_keys
        ADD COLUMN application text,
        ADD COLUMN rooms int4[],
        ADD COLUMN event_types text[],
        ADD COLUMN subscriptions uuid[],
        ADD COLUMN networks text[],
        ADD COLUMN expires_at timestamptz,
        ADD COLUMN last_used_at timestamptz,
        ADD COLUMN prefix text,
        ADD COLUMN previous_key_hash bytea UNIQUE,
        ADD COLUMN previous_until timestamptz
    """,
    """
    ALTER TABLE rooms
        ADD COLUMN visibility text NOT NULL DEFAULT 'private',
        ADD COLUMN subscription_policy text NOT NULL DEFAULT 'owner_only',
        ADD COLUMN reapprove_on text[] NOT NULL DEFAULT '{push_url,event_types}',
        ADD COLUMN transparent boolean NOT NULL DEFAULT false,
        ADD COLUMN operational_events text[] NOT NULL DEFAULT '{rooms.subscription.pending,rooms.subscription.approved,rooms.subscription.rejected,rooms.subscription.suspended,rooms.subscription.reinstated,rooms.subscription.terminated,rooms.endpoint.disabled}'
    """,
    "CREATE INDEX rooms_listed ON rooms (created_at DESC, id DESC) WHERE visibility = 'listed' AND NOT deleting",
    """
    CREATE TABLE grants (
        room_id int4 NOT NULL,
        id uuid NOT NULL,
        organisation_id uuid REFERENCES organisations (id),
        kind text NOT NULL,
        event_types text[],
        starts_at timestamptz NOT NULL DEFAULT now(),
        until timestamptz,
        created_at timestamptz NOT NULL DEFAULT now(),
        revoked_at timestamptz,
        begins_later boolean NOT NULL DEFAULT false,
        PRIMARY KEY (room_id, id)
    )
    """,
    "CREATE INDEX grants_of_organisation ON grants (organisation_id, room_id) WHERE revoked_at IS NULL",
    "CREATE INDEX grants_with_end ON grants (until) WHERE revoked_at IS NULL AND until IS NOT NULL",
    "CREATE INDEX grants_to_begin ON grants (starts_at) WHERE revoked_at IS NULL AND begins_later",
    """
    ALTER TABLE subscriptions
        ADD COLUMN organisation_id uuid REFERENCES organisations (id),
        ADD COLUMN application text,
        ADD COLUMN own_status text,
        ADD COLUMN suspended_by text[] NOT NULL DEFAULT '{}',
        ADD COLUMN backfill boolean NOT NULL DEFAULT false,
        ADD COLUMN approved_at timestamptz,
        ADD COLUMN proposal jsonb
    """,
    "UPDATE subscriptions s SET organisation_id = r.organisation_id, approved_at = s.created_at FROM rooms r WHERE r.id = s.room_id",
    # A subscription whose room has no row any more is only waiting to be deleted.
    "DELETE FROM subscriptions WHERE organisation_id IS NULL",
    "ALTER TABLE subscriptions ALTER COLUMN organisation_id SET NOT NULL",
    "CREATE INDEX subscriptions_of_organisation ON subscriptions (organisation_id, id) WHERE status <> 'deleted'",
    "DROP INDEX subscriptions_name",
    # Another subscriber's name must not show by a conflict; an ended subscription frees its name.
    """
    CREATE UNIQUE INDEX subscriptions_name ON subscriptions (name, room_id, organisation_id)
        WHERE status NOT IN ('deleted', 'rejected', 'terminated')
    """,
    """
    CREATE TABLE subscription_history (
        room_id int4 NOT NULL,
        id uuid NOT NULL DEFAULT gen_random_uuid(),
        subscription_id uuid NOT NULL,
        at timestamptz NOT NULL DEFAULT clock_timestamp(),
        action text NOT NULL,
        status text NOT NULL,
        organisation_id uuid,
        key_id uuid,
        application text,
        reason text,
        snapshot jsonb NOT NULL,
        PRIMARY KEY (room_id, id)
    )
    """,
    "CREATE INDEX subscription_history_of ON subscription_history (subscription_id, at, id)",
    # Null: the room's owner published it. Most messages have neither, and cost no index entry.
    "ALTER TABLE messages ADD COLUMN publisher_organisation_id uuid, ADD COLUMN application text",
    """
    CREATE INDEX messages_foreign ON messages (publisher_organisation_id, room_id, id)
        WHERE publisher_organisation_id IS NOT NULL
    """,
    "CREATE INDEX messages_application ON messages (application, room_id, id) WHERE application IS NOT NULL",
    # Each organisation has at most one recipient of operational events in a room.
    """
    CREATE UNIQUE INDEX subscriptions_operational ON subscriptions (room_id, organisation_id)
        WHERE operational AND status NOT IN ('deleted', 'rejected', 'terminated')
    """,
    """
    CREATE TABLE operational_outbox (
        room_id int4 NOT NULL,
        event text NOT NULL,
        organisation_id uuid NOT NULL,
        id int8 NOT NULL GENERATED ALWAYS AS IDENTITY,
        subscription_id uuid,
        at timestamptz NOT NULL DEFAULT now(),
        data jsonb NOT NULL,
        PRIMARY KEY (room_id, event, organisation_id, id)
    )
    """,
    """
    CREATE TABLE operational_overflow (
        room_id int4 NOT NULL,
        event text NOT NULL,
        organisation_id uuid NOT NULL,
        slot int2 NOT NULL,
        total int8 NOT NULL,
        PRIMARY KEY (room_id, event, organisation_id, slot)
    )
    """,
    """
    CREATE TABLE operational_pace (
        room_id int4 NOT NULL,
        event text NOT NULL,
        batches int8 NOT NULL,
        spent_until timestamptz NOT NULL,
        PRIMARY KEY (room_id, event)
    )
    """,
    """
    CREATE TABLE operational_messages (
        room_id int4 NOT NULL,
        id uuid NOT NULL,
        enqueued bytea NOT NULL,
        since timestamptz NOT NULL DEFAULT now(),
        check_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (room_id, id)
    )
    """,
    "CREATE INDEX operational_messages_check ON operational_messages (check_at)",
)

# The older schema knows neither other subscribers nor narrow keys: what it cannot hold ends.
REVERSE = (
    "DROP TABLE operational_messages",
    "DROP TABLE operational_pace",
    "DROP TABLE operational_overflow",
    "DROP TABLE operational_outbox",
    "DROP INDEX subscriptions_operational",
    "DROP INDEX messages_foreign",
    "DROP INDEX messages_application",
    "ALTER TABLE messages DROP COLUMN publisher_organisation_id, DROP COLUMN application",
    "DROP TABLE subscription_history",
    "DROP INDEX subscriptions_name",
    """
    UPDATE subscriptions s SET status = 'deleted' FROM rooms r
    WHERE r.id = s.room_id AND (r.organisation_id <> s.organisation_id OR s.status IN ('pending', 'rejected', 'terminated'))
    """,
    "UPDATE subscriptions SET status = coalesce(own_status, 'paused') WHERE status = 'suspended'",
    "CREATE UNIQUE INDEX subscriptions_name ON subscriptions (name, room_id) WHERE status <> 'deleted'",
    """
    ALTER TABLE subscriptions DROP COLUMN organisation_id, DROP COLUMN application, DROP COLUMN own_status,
        DROP COLUMN suspended_by, DROP COLUMN backfill, DROP COLUMN approved_at, DROP COLUMN proposal
    """,
    "DROP TABLE grants",
    "DROP INDEX rooms_listed",
    """
    ALTER TABLE rooms DROP COLUMN visibility, DROP COLUMN subscription_policy, DROP COLUMN reapprove_on,
        DROP COLUMN transparent, DROP COLUMN operational_events
    """,
    """
    UPDATE api_keys SET revoked_at = coalesce(revoked_at, now())
    WHERE rooms IS NOT NULL OR event_types IS NOT NULL OR subscriptions IS NOT NULL OR networks IS NOT NULL OR expires_at IS NOT NULL
    """,
    """
    ALTER TABLE api_keys DROP COLUMN application, DROP COLUMN rooms, DROP COLUMN event_types, DROP COLUMN subscriptions,
        DROP COLUMN networks, DROP COLUMN expires_at, DROP COLUMN last_used_at, DROP COLUMN prefix,
        DROP COLUMN previous_key_hash, DROP COLUMN previous_until
    """,
    """
    ALTER TABLE organisations DROP COLUMN member_id, DROP COLUMN contact, DROP COLUMN status,
        DROP COLUMN status_reason, DROP COLUMN status_since, DROP COLUMN updated_at
    """,
)


def upgrade() -> None:
    """Add the columns and tables, and give each subscription to the organisation of its room."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Remove them. Subscriptions of others are deleted, and keys with restrictions revoked."""
    for statement in REVERSE:
        op.execute(statement)
