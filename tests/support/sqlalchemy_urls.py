"""Name databases for SQLAlchemy's engines without asyncio, which only tests open."""

from rooms.db.connection import psycopg_url


def sqlalchemy_url(url: str) -> str:
    """Return `postgresql://…` with the name of SQLAlchemy's psycopg dialect."""
    return psycopg_url(url).replace("postgresql:", "postgresql+psycopg:", 1)
