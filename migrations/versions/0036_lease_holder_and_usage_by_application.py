"""Say whose next pull acknowledges a lease, and count usage by application."""

from alembic import op

revision = "0036"
down_revision = "0035"
COUNTERS = (
    "messages", "bytes", "deliveries", "attempts", "failed_attempts", "delivered", "sidelined",
    "expired", "cancelled", "dropped", "purged",
)  # fmt: skip
_COUNTS = ", ".join(COUNTERS)
_SUMS = ", ".join(f"sum({name})::int8 AS {name}" for name in COUNTERS)
STATEMENTS = (
    # No default and no index: what is leased without it costs what it did.
    "ALTER TABLE leases ADD COLUMN holder text",
    # What was counted before has no application. Nothing but counting waits for the new key.
    "ALTER TABLE usage_hours ADD COLUMN application text NOT NULL DEFAULT ''",
    """
    ALTER TABLE usage_hours DROP CONSTRAINT usage_hours_pkey, ADD CONSTRAINT usage_hours_pkey
        PRIMARY KEY (room_id, hour, owner_id, organisation_id, event_type, application)
    """,
    "DROP INDEX usage_hours_organisation",
    "CREATE INDEX usage_hours_organisation ON usage_hours (organisation_id, hour, application)",
)
FORMER = (
    "ALTER TABLE leases DROP COLUMN holder",
    f"""
    CREATE TEMPORARY TABLE summed ON COMMIT DROP AS
    SELECT room_id, hour, owner_id, organisation_id, event_type, {_SUMS}
    FROM usage_hours GROUP BY 1, 2, 3, 4, 5
    """,  # noqa: S608 - constants
    "TRUNCATE usage_hours",
    "DROP INDEX usage_hours_organisation",
    "ALTER TABLE usage_hours DROP CONSTRAINT usage_hours_pkey, DROP COLUMN application",
    """
    ALTER TABLE usage_hours ADD CONSTRAINT usage_hours_pkey
        PRIMARY KEY (room_id, hour, owner_id, organisation_id, event_type)
    """,
    f"""
    INSERT INTO usage_hours (room_id, hour, owner_id, organisation_id, event_type, {_COUNTS})
    SELECT * FROM summed
    """,  # noqa: S608 - constants
    "CREATE INDEX usage_hours_organisation ON usage_hours (organisation_id, hour)",
)


def upgrade() -> None:
    """Add the columns: leases that are held now are acknowledged by no pull."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Sum up the applications: the older schema has no place for them."""
    for statement in FORMER:
        op.execute(statement)
