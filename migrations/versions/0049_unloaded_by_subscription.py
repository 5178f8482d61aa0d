"""Find the sidelines that wait for their magazine, one subscription after another."""

from migrations.concurrent_indexes import replace_index

revision = "0049"
down_revision = "0048"


def upgrade() -> None:
    """Index by subscription before the age: organisations get turns, and none waits for a line."""
    replace_index(
        "sidelined_unloaded",
        "sidelined (subscription_id, since) WHERE shard IS NULL",
        temporary="sidelined_unloaded_by_subscription",
    )


def downgrade() -> None:
    """Index by age only."""
    replace_index(
        "sidelined_unloaded",
        "sidelined (since) WHERE shard IS NULL",
        temporary="sidelined_unloaded_by_age",
    )
