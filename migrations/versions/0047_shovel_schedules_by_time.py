"""Index open jobs by kind and organisation, and shovel schedules by time and by organisation."""

from alembic import op

from migrations.concurrent_indexes import build_index

revision = "0047"
down_revision = "0046"


def upgrade() -> None:
    """Add the organisation to schedules. One that an older process writes has none, and runs."""
    build_index(
        "jobs_open_of_kind",
        "jobs (kind, organisation_id, created_at) WHERE state IN ('queued', 'running')",
    )
    op.execute("ALTER TABLE shovel_schedules ADD COLUMN organisation_id uuid")
    op.execute(
        "UPDATE shovel_schedules s SET organisation_id = u.organisation_id FROM subscriptions u"
        " WHERE u.room_id = s.room_id AND u.id = s.subscription_id"
    )
    op.execute("CREATE INDEX shovel_schedules_due ON shovel_schedules (next_at)")
    op.execute(
        "CREATE INDEX shovel_schedules_of_organisation ON shovel_schedules (organisation_id)"
    )


def downgrade() -> None:
    """Remove the indexes and the column."""
    op.execute("ALTER TABLE shovel_schedules DROP COLUMN organisation_id")
    op.execute("DROP INDEX shovel_schedules_due")
    op.execute("DROP INDEX jobs_open_of_kind")
