"""Addresses of PostgreSQL as libpq reads them."""

import pytest
from psycopg.conninfo import conninfo_to_dict

from rooms.db.connection import psycopg_url


@pytest.mark.parametrize("value", ["/with space", "/plus+", "/%20", "/a&b=c#d?e"])
def test_every_character_of_a_parameter_reaches_libpq(value: str) -> None:
    given = "".join(f"%{byte:02X}" for byte in value.encode())
    url = psycopg_url(f"postgresql://me:p+w@/rooms?host={given}&connect_timeout=3")
    assert conninfo_to_dict(url) == {
        "user": "me",
        "password": "p+w",
        "dbname": "rooms",
        "host": value,
        "connect_timeout": "3",
    }
