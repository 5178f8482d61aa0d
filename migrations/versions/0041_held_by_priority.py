"""Release held deliveries by priority."""

from migrations.concurrent_indexes import replace_index

revision = "0041"
down_revision = "0040"


def upgrade() -> None:
    """Index by priority before the id: a release reads as many rows as it takes, as before."""
    replace_index(
        "held_subscription",
        "held (subscription_id, reason, priority DESC, id)",
        temporary="held_subscription_by_priority",
    )


def downgrade() -> None:
    """Index by age only."""
    replace_index(
        "held_subscription",
        "held (subscription_id, reason, id)",
        temporary="held_subscription_by_age",
    )
