"""Serve GovStack's interfaces: which rooms, where its webhooks go, and what they carry."""

from alembic import op

revision = "0031"
down_revision = "0030"


def upgrade() -> None:
    """Add the columns; nothing is served by these interfaces until it is switched on."""
    op.execute("ALTER TABLE rooms ADD COLUMN govstack boolean NOT NULL DEFAULT false")
    op.execute("ALTER TABLE organisations ADD COLUMN push_template text")
    op.execute(
        "ALTER TABLE subscriptions ADD COLUMN event_item boolean NOT NULL DEFAULT false,"
        " ADD COLUMN ack_by_next_pull boolean NOT NULL DEFAULT false"
    )


def downgrade() -> None:
    """Drop them; webhooks carry the plain payload again."""
    op.execute("ALTER TABLE subscriptions DROP COLUMN event_item, DROP COLUMN ack_by_next_pull")
    op.execute("ALTER TABLE organisations DROP COLUMN push_template")
    op.execute("ALTER TABLE rooms DROP COLUMN govstack")
