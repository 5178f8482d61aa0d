"""Store the organisation and the settings of handler queues."""

from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Create the table, empty."""
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
    """Drop it."""
    op.execute("DROP TABLE queues")
