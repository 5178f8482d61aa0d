"""Keep what waits for an export of the log from costing more than it must."""

from alembic import op

revision = "0040"
down_revision = "0039"


def upgrade() -> None:
    """Let jobs be snoozed, note exports that found nothing, and when a writer has ended."""
    op.execute("ALTER TABLE jobs ADD COLUMN snoozed_until timestamptz")
    op.execute("ALTER TABLE log_exports ADD COLUMN seen_at timestamptz")
    op.execute("ALTER TABLE log_export_writers ADD COLUMN ended_xid bigint")


def downgrade() -> None:
    """Remove them."""
    op.execute("ALTER TABLE log_export_writers DROP COLUMN ended_xid")
    op.execute("ALTER TABLE log_exports DROP COLUMN seen_at")
    op.execute("ALTER TABLE jobs DROP COLUMN snoozed_until")
