"""Record the processes of an installation and the backends that each of them runs on."""

from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    """Create the table; processes add their rows when they start."""
    op.execute(
        """
        CREATE TABLE processes (
            name text NOT NULL PRIMARY KEY,
            kind text NOT NULL,
            host text NOT NULL,
            pid integer NOT NULL,
            since timestamptz NOT NULL DEFAULT now(),
            seen_at timestamptz NOT NULL DEFAULT now(),
            stopped boolean NOT NULL DEFAULT false,
            broker text NOT NULL,
            election text NOT NULL,
            magazines text NOT NULL,
            farm text NOT NULL,
            client text NOT NULL
        )
        """
    )


def downgrade() -> None:
    """Drop it."""
    op.execute("DROP TABLE processes")
