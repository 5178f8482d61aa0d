"""Handler queues: whose they are, and how they are set."""

from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Make the table, empty."""
    op.execute(
        """
        CREATE TABLE queues (
            name text PRIMARY KEY,
            organisation_id uuid NOT NULL REFERENCES organisations (id),
            settings jsonb NOT NULL,
            deleting boolean NOT NULL DEFAULT false,
            created_at timestamptz NOT NULL DEFAULT now(),
            updated_at timestamptz NOT NULL DEFAULT now()
        );
        CREATE INDEX queues_of_organisation ON queues (organisation_id, name);
        """
    )


def downgrade() -> None:
    """Take it away."""
    op.execute("DROP TABLE queues")
