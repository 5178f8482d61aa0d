"""Create the tables of members, of partitions and of terms."""

from alembic import op

revision = "0003"
down_revision = "0002"

# Every member changes a row once a second, and the tables are never large: half-empty pages keep
# each change on its page.
ELECTIONS = """
CREATE TABLE election_members (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    host text NOT NULL,
    pid integer NOT NULL,
    process text,
    since timestamptz NOT NULL DEFAULT now(),
    until timestamptz NOT NULL
) WITH (fillfactor = 50);
CREATE TABLE election_partitions (
    name text PRIMARY KEY,
    member integer REFERENCES election_members (id) ON DELETE SET NULL,
    assigned bigint NOT NULL,
    holder integer REFERENCES election_members (id) ON DELETE SET NULL,
    epoch bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);
CREATE TABLE election_terms (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    epoch bigint NOT NULL DEFAULT 0,
    term bigint NOT NULL DEFAULT 0,
    leader text,
    led_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);
INSERT INTO election_terms DEFAULT VALUES;
"""


def upgrade() -> None:
    """Create the three tables, and the row that counts epochs."""
    op.execute(ELECTIONS)


def downgrade() -> None:
    """Drop them; members register again, and epochs start anew."""
    op.execute("DROP TABLE election_terms, election_partitions, election_members")
