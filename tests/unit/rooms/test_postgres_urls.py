"""Test that every parser reads a URL of PostgreSQL alike, and that problems show no password."""

import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.dialects.postgresql import psycopg as driver
from sqlalchemy.engine import make_url

from rooms.backend_urls import BackendUrlError
from rooms.db.connection import connect_arguments, psycopg_url
from rooms.postgres_urls import parse_postgres_url
from tests.support.sqlalchemy_urls import sqlalchemy_url

_VALID = {
    "postgresql://": {},
    "postgresql:///rooms": {"dbname": "rooms"},
    "postgresql://h/db": {"host": "h", "dbname": "db"},
    "postgresql://u:p%20x@h/db": {"user": "u", "password": "p x", "host": "h", "dbname": "db"},
    "postgresql://u%20v@h/my%20db": {"user": "u v", "host": "h", "dbname": "my db"},
    "postgresql://u+v:p+w@h/a+b": {"user": "u+v", "password": "p+w", "host": "h", "dbname": "a+b"},
    "postgresql:///db?host=/tmp/a+b": {"host": "/tmp/a+b", "dbname": "db"},
    "postgresql:///db?host=/tmp/a%20b%2Bc": {"host": "/tmp/a b+c", "dbname": "db"},
    "postgresql://u@%2Ftmp%2Fa/db": {"user": "u", "host": "/tmp/a", "dbname": "db"},
    "postgresql://u:pa[ss]@h/db": {"user": "u", "password": "pa[ss]", "host": "h", "dbname": "db"},
    "postgresql://[::1]:5433/db": {"host": "::1", "port": "5433", "dbname": "db"},
    "postgresql://h1:5432,h2:5433/db": {"host": "h1,h2", "port": "5432,5433", "dbname": "db"},
    "postgresql://u:p@h1,[::2]:5433/db?options=-c%20a%3Db": {
        "user": "u", "password": "p", "host": "h1,::2", "port": ",5433", "dbname": "db", "options": "-c a=b",
    },
    "postgresql://h1:1,h2:2/db?application_name=a@b": {
        "host": "h1,h2", "port": "1,2", "dbname": "db", "application_name": "a@b",
    },
    "postgresql:///db?host=h1,h2&port=5432,5433": {"host": "h1,h2", "port": "5432,5433", "dbname": "db"},
}  # fmt: skip


@pytest.mark.parametrize(("url", "expected"), _VALID.items())
def test_every_parser_reads_the_same(url: str, expected: dict[str, str]) -> None:
    assert conninfo_to_dict(url) == expected, "libpq agrees"
    assert parse_postgres_url(url) == expected
    assert conninfo_to_dict(psycopg_url(url)) == expected
    asked = connect_arguments(url, name="a test")
    assert {key: value for key, value in asked.items() if key in expected} == expected
    _, arguments = driver.dialect().create_connect_args(make_url(sqlalchemy_url(url)))  # type: ignore[no-untyped-call]
    if not {"hostaddr", "::"} & set(expected.get("host", "").split(",")) and "::2" not in url:
        assert {key: str(value) for key, value in arguments.items()} == expected


@pytest.mark.parametrize(
    ("url", "password"),
    [
        ("postgresql://u:p/q@h/db", "p/q"),
        ("postgresql://u:1/q@h/db", "1/q"),
        ("postgresql://u:p?q@h/db", "p?q"),
        ("postgresql://u:p%zz@h/db", "p%zz"),
    ],
)
def test_a_password_may_have_what_only_libpq_refuses(url: str, password: str) -> None:
    expected = {"user": "u", "password": password, "host": "h", "dbname": "db"}
    assert parse_postgres_url(url) == expected
    assert conninfo_to_dict(psycopg_url(url)) == expected


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("postgresql:rooms", "has the form"),
        ("postgresql://u:hunter2@h:notaport/db", "port"),
        ("postgresql://u:hunter2@h:0/db", "port"),
        ("postgresql://u:hunter2@h:65536/db", "port"),
        ("postgresql://h/db?port=hunter2", "port"),
        ("postgresql://u:secret@hunter2@h/db", "@ is written as %40"),
        ("postgresql://[::1/rooms", "HOST:PORT"),
        ("postgresql://u:hunter2%00@h/db", "%00"),
    ],
)
def test_a_problem_shows_no_password(url: str, problem: str) -> None:
    with pytest.raises(BackendUrlError, match=problem) as caught:
        parse_postgres_url(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ("-c+search_path%3Drooms", "-c search_path=rooms"),
        ("%2Dc+search_path=rooms", "-c search_path=rooms"),
        ("+-c+a%3D1+-c+b%3D2+", " -c a=1 -c b=2 "),
        ("-ca%3D1+--b%3D2", "-ca=1 --b=2"),
        ("-c%20a%3D1++-c%20b%3D2", "-c a=1  -c b=2"),
        ("-c++a%3D1", "-c  a=1"),
        ("-c+search_path%3Da,%5C+b", r"-c search_path=a,\ b"),
        ("-c%20timezone%3DUTC+3", "-c timezone=UTC+3"),
        ("-c+a%3D1%2B-c", "-c a=1+-c"),
        ("-c+a%3D1&options=-c+b%3D2", "-c a=1 -c b=2"),
    ],
)
def test_a_plus_between_options_is_a_space_as_before(given: str, options: str) -> None:
    """The server would refuse every connection, as it has no parameter `+search_path`."""
    url = f"postgresql://h/db?options={given}&application_name=a+b"
    expected = {"host": "h", "dbname": "db", "options": options, "application_name": "a+b"}
    assert parse_postgres_url(url) == expected
    assert conninfo_to_dict(psycopg_url(url)) == expected
    assert connect_arguments(url, name="a test")["options"] == options
