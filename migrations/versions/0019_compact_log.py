"""Write steps that always come together as one log entry.

The view `delivery_log` shows each of them. The view `delivery_log` shows each of them.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from alembic import op

revision = "0019"
down_revision = "0018"

# A publish has its deliveries in `enqueued`, 36 octets each: the subscription's id, the delivery's
# id, the policy version. They are numbered after it. A success with a status is its attempt too
# (`folded`), which is numbered before it.
STEPS = """
CREATE VIEW delivery_log AS
SELECT room_id, message_id, writer_id, writer_seq, xid, ts, kind, subscription_id, delivery_id, generation, attempt,
    event_version, fanout, payload_bytes, policy_version, CASE WHEN NOT folded THEN delay_ms END AS delay_ms,
    CASE WHEN NOT folded THEN latency_ms END AS latency_ms, worker, CASE WHEN NOT folded THEN http_status END AS http_status,
    schema_version, correlation_id, event_type, target_host, CASE WHEN NOT folded THEN worker_host END AS worker_host,
    error_class, CASE WHEN enqueued IS NULL THEN detail END AS detail, CASE WHEN NOT folded THEN answer_head END AS answer_head
FROM (SELECT *, kind = 'delivered' AND http_status IS NOT NULL AS folded FROM log_entries) l
UNION ALL
SELECT room_id, message_id, writer_id, writer_seq - 1, xid, ts, 'attempted', subscription_id, delivery_id, generation, attempt,
    event_version, fanout, payload_bytes, policy_version, delay_ms, latency_ms, worker, http_status, schema_version,
    correlation_id, event_type, target_host, worker_host, error_class, detail, answer_head
FROM log_entries WHERE kind = 'delivered' AND http_status IS NOT NULL
UNION ALL
SELECT room_id, message_id, writer_id, writer_seq + n, xid, ts, 'enqueued',
    encode(substr(enqueued, 36 * n - 35, 16), 'hex')::uuid, encode(substr(enqueued, 36 * n - 19, 16), 'hex')::uuid, 0, 0,
    event_version, NULL, NULL, ('x' || encode(substr(enqueued, 36 * n - 3, 4), 'hex'))::bit(32)::integer, delay_ms, NULL,
    NULL, NULL, schema_version, correlation_id, event_type, NULL, NULL, NULL, detail, NULL
FROM log_entries, generate_series(1, octet_length(enqueued) / 36) AS n WHERE enqueued IS NOT NULL
"""
SENDS = """
CREATE VIEW published_messages AS
    SELECT room_id, message_id, subscription_id, delivery_id, kind, generation, attempt, delay_ms, correlation_id, ts
    FROM delivery_log
    WHERE kind IN ('enqueued', 'retry_scheduled', 'released', 'lease_ended', 'nacked', 'shoveled', 'restored', 'replayed')
"""
# Partitions, indexes and constraints are named after the table. The text of a mirror trigger, which
# retention has while it copies a day, names them: it is dropped, and the day is begun again.
RENAME = """
DO $$
DECLARE of record;
BEGIN
    FOR of IN SELECT oid::regprocedure AS name FROM pg_proc
        WHERE pronamespace = current_schema()::regnamespace AND proname ~ '^{old}_[0-9]+(_kept[0-9]+)?_mirror$' LOOP
        EXECUTE format('DROP FUNCTION %s CASCADE', of.name);
    END LOOP;
    FOR of IN SELECT relname AS name, replace(relname, '{old}', '{new}') AS other FROM pg_class
        WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p', 'i', 'I') AND relname ~ '^{old}(_|$)' LOOP
        EXECUTE format('ALTER TABLE %I RENAME TO %I', of.name, of.other);
    END LOOP;
    FOR of IN SELECT conrelid::regclass AS at, conname AS name, replace(conname, '{old}', '{new}') AS other FROM pg_constraint
        WHERE connamespace = current_schema()::regnamespace AND contype = 'c' AND conname ~ '^{old}_' LOOP
        EXECUTE format('ALTER TABLE %s RENAME CONSTRAINT %I TO %I', of.at, of.name, of.other);
    END LOOP;
END $$
"""
_COLUMNS = (
    "room_id, message_id, writer_id, writer_seq, xid, ts, kind, subscription_id, delivery_id, generation, attempt, event_version,"
    " fanout, payload_bytes, policy_version, delay_ms, latency_ms, worker, http_status, schema_version, correlation_id,"
    " event_type, target_host, worker_host, error_class, detail, answer_head"
)


def upgrade() -> None:
    """Create the table; existing rows stay as they are.

    Ids cannot be compressed, and a slice of a value that is stored plainly can be read without the
    rest.
    """
    op.execute("DROP VIEW published_messages")
    op.execute(RENAME.format(old="delivery_log", new="log_entries"))
    op.execute("ALTER TABLE log_entries ADD COLUMN enqueued bytea STORAGE EXTERNAL")
    op.execute(STEPS)
    op.execute(SENDS)


def downgrade() -> None:
    """Write one row for every step again."""
    op.execute(
        f"CREATE TEMPORARY TABLE steps ON COMMIT DROP AS SELECT {_COLUMNS} FROM delivery_log s"  # noqa: S608 - constants of this package
        " WHERE NOT EXISTS (SELECT FROM log_entries l WHERE (l.room_id, l.message_id, l.writer_id, l.writer_seq)"
        " = (s.room_id, s.message_id, s.writer_id, s.writer_seq))"
    )
    op.execute("DROP VIEW published_messages")
    op.execute("DROP VIEW delivery_log")
    op.execute(RENAME.format(old="log_entries", new="delivery_log"))
    op.execute(f"INSERT INTO delivery_log ({_COLUMNS}) SELECT * FROM steps")  # noqa: S608 - constants of this package
    op.execute(
        "UPDATE delivery_log SET detail = NULL WHERE enqueued IS NOT NULL AND detail IS NOT NULL"
    )
    op.execute(
        "UPDATE delivery_log SET delay_ms = NULL, latency_ms = NULL, http_status = NULL, worker_host = NULL,"
        " answer_head = NULL WHERE kind = 'delivered' AND http_status IS NOT NULL"
    )
    op.execute("ALTER TABLE delivery_log DROP COLUMN enqueued")
    op.execute(SENDS)
