"""Store due times, business keys and caller's ids of messages.

Scheduled work is indexed by slot. A slot is a hash of the delivery's id. So schedule shards, which
are ranges of slots, can be shared out, and their number can be changed without an update of any
work row. With PostgreSQL as broker the index stays empty.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from alembic import op

revision = "0011"
down_revision = "0010"

UP = """
ALTER TABLE messages ADD COLUMN due_at timestamptz, ADD COLUMN business_key text, ADD COLUMN caller_id text;
CREATE INDEX messages_business_key ON messages (business_key, room_id, id) WHERE business_key IS NOT NULL;
CREATE TABLE message_ids (
    room_id integer NOT NULL,
    caller_id text NOT NULL,
    message_id uuid NOT NULL,
    content_hash bytea NOT NULL,
    answer bytea NOT NULL,
    PRIMARY KEY (room_id, caller_id)
);
CREATE TABLE due_buckets (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    count integer NOT NULL DEFAULT 8 CHECK (count BETWEEN 1 AND 256)
);
INSERT INTO due_buckets DEFAULT VALUES;
DROP INDEX outbox_later;
CREATE INDEX outbox_later ON outbox ((uuid_hash(id) & 255), due_at) WHERE kind IN (6, 7);
INSERT INTO upkeep_marks (name, at) SELECT 'relayed', now() WHERE EXISTS (SELECT FROM outbox WHERE kind > 1);
"""
DOWN = """
DELETE FROM upkeep_marks WHERE name = 'relayed';
DROP INDEX outbox_later;
CREATE INDEX outbox_later ON outbox (due_at) WHERE kind IN (6, 7);
DROP TABLE due_buckets;
DROP TABLE message_ids;
DROP INDEX messages_business_key;
ALTER TABLE messages DROP COLUMN due_at, DROP COLUMN business_key, DROP COLUMN caller_id;
"""


def upgrade() -> None:
    """Create them."""
    op.execute(UP)


def downgrade() -> None:
    """Drop them."""
    op.execute(DOWN)
