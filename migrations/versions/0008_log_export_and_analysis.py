"""Record which rows of the log were exported, and store analysis results.

Log rows are indexed by transaction.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from alembic import op

revision = "0008"
down_revision = "0007"

# The log is only appended to, so a BRIN index costs a few bytes a megabyte and nothing measurable
# at an insert. There is no operator class of xid8 for it, hence the expression.
UP = """
CREATE TABLE log_exports (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    destination text NOT NULL,
    system text NOT NULL,
    first_xid bigint NOT NULL,
    end_xid bigint NOT NULL,
    planned_at timestamptz NOT NULL DEFAULT now(),
    sealed_at timestamptz,
    rows bigint,
    bytes bigint,
    files integer
);
CREATE UNIQUE INDEX log_exports_range ON log_exports (destination, system, first_xid);
CREATE TABLE log_export_writers (
    destination text NOT NULL,
    system text NOT NULL,
    writer_id integer NOT NULL,
    rows bigint NOT NULL,
    last_seq bigint NOT NULL,
    PRIMARY KEY (destination, system, writer_id)
) WITH (fillfactor = 70);
CREATE INDEX delivery_log_xid ON delivery_log USING brin ((xid::text::bigint)) WITH (pages_per_range = 64);
CREATE TABLE analysis_runs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run bigint NOT NULL,
    analysed_at timestamptz NOT NULL,
    loaded_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE analysis_rows (
    organisation_id uuid NOT NULL,
    finding text NOT NULL,
    number bigint NOT NULL,
    run_id bigint NOT NULL,
    rooms integer[] NOT NULL,
    subscriptions uuid[] NOT NULL,
    began timestamptz,
    ended timestamptz,
    body jsonb NOT NULL,
    PRIMARY KEY (organisation_id, finding, number)
);
"""
DOWN = """
DROP TABLE analysis_rows;
DROP TABLE analysis_runs;
DROP INDEX delivery_log_xid;
DROP TABLE log_export_writers;
DROP TABLE log_exports;
"""


def upgrade() -> None:
    """Create them; nothing is exported yet."""
    for statement in UP.split(";\n"):
        if statement.strip():
            op.execute(statement)


def downgrade() -> None:
    """Drop them; exported segments stay."""
    for statement in DOWN.split(";\n"):
        if statement.strip():
            op.execute(statement)
