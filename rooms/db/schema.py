"""Bring a database to the schema that this code needs."""

from datetime import UTC, datetime
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, text

import migrations
from rooms.db.connection import sqlalchemy_url
from rooms.db.retention.partitions import ensure_partitions

_MIGRATION_LOCK = 0x726F6F6D


def migrate(url: str) -> None:
    """Run every revision that the database lacks, then make the partitions of the coming days.

    Several processes may call this at once: an advisory lock lets one of them work, and the others
    find nothing to do.
    """
    engine = create_engine(sqlalchemy_url(url))
    try:
        with engine.connect() as connection:
            connection.execute(text(f"SELECT pg_advisory_lock({_MIGRATION_LOCK})"))
            connection.commit()
            config = Config()
            config.set_main_option("script_location", str(Path(migrations.__file__).parent))
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            ensure_partitions(connection, datetime.now(UTC))
            connection.commit()
            connection.execute(text(f"SELECT pg_advisory_unlock({_MIGRATION_LOCK})"))
            connection.commit()
    finally:
        engine.dispose()
