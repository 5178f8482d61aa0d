"""What every test may ask for: one PostgreSQL a session, one database a test."""

import os
from collections.abc import Iterator
from itertools import count

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.engine import make_url

from rooms.embedded import temporary_postgres

TEMPLATE = "rooms_template"


def at(url: str, database: str) -> str:
    """The same server, another database."""
    return make_url(url).set(database=database).render_as_string(hide_password=False)


def administer(url: str, statement: str, *names: str) -> None:
    """One statement outside a transaction, `{}` standing for each name."""
    with psycopg.connect(at(url, "postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of our own, or the one that the environment names."""
    given = os.environ.get("DATABASE_URL_TEST") or os.environ.get("TEST_DATABASE_URL")
    if given:
        yield given
        return
    with temporary_postgres(tmp_path_factory.mktemp("postgres")) as url:
        yield url


@pytest.fixture(scope="session")
def template(postgres_url: str) -> Iterator[str]:
    """The name of a database with every migration in it, to copy from."""
    from rooms.storage.schema import migrate

    name = f"{TEMPLATE}_{os.getpid()}"
    administer(postgres_url, "CREATE DATABASE {}", name)
    migrate(at(postgres_url, name))
    yield name
    administer(postgres_url, "DROP DATABASE {} WITH (FORCE)", name)


@pytest.fixture(scope="session")
def database_numbers() -> Iterator[int]:
    return count(1)


@pytest.fixture
def empty_database(postgres_url: str, database_numbers: Iterator[int]) -> Iterator[str]:
    """The address of a new database with nothing in it."""
    name = f"empty_{os.getpid()}_{next(database_numbers)}"
    administer(postgres_url, "CREATE DATABASE {}", name)
    yield at(postgres_url, name)
    administer(postgres_url, "DROP DATABASE {} WITH (FORCE)", name)


@pytest.fixture
def database(postgres_url: str, template: str, database_numbers: Iterator[int]) -> Iterator[str]:
    """The address of a new database with every migration in it. A copy through the WAL: no checkpoints, half the time."""
    name = f"test_{os.getpid()}_{next(database_numbers)}"
    administer(postgres_url, "CREATE DATABASE {} TEMPLATE {}", name, template)
    yield at(postgres_url, name)
    administer(postgres_url, "DROP DATABASE {} WITH (FORCE)", name)
