"""Make a session's settings by one statement after connecting.

As startup parameters, a proxy such as PgBouncer would refuse those that it does not know. The
operator's own, in the URL or PGOPTIONS, are startup parameters, and win.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import psycopg
from psycopg.pq import Conninfo
from sqlalchemy import event
from sqlalchemy.pool import Pool

from rooms.postgres_urls import parse_postgres_url

# The server gives up a client that vanished as soon as it is given up itself, or its transactions
# would keep their locks for two hours.
SERVER_KEEPALIVES: Final = {
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "3",
    "tcp_keepalives_count": "3",
}
"""Settings for a client that may read slowly: the server waits while its window is full."""
SERVER_TIMEOUTS: Final = {**SERVER_KEEPALIVES, "tcp_user_timeout": "15000"}
IDLE_TRANSACTIONS: Final = {"idle_in_transaction_session_timeout": "30s"}
"""One that is suspended answers keepalives. No transaction does anything but statements so long."""
CUSTOM_PLANS: Final = {"plan_cache_mode": "force_custom_plan"}
"""A plan for any value does not know how few rows LIMIT leaves: it sorts millions for 50."""

_WORD: Final = re.compile(r"(?:\\.|\S)+", re.DOTALL)
_SETTING: Final = re.compile(r"(?:-c|--)?(?P<name>[\w.-]+)=.*", re.DOTALL)


def settings_statement(url: str, settings: Mapping[str, str]) -> str | None:
    """Return a statement that makes those of `settings` that the operator has not made.

    None: there are none. The values are constants of this code.
    """
    made = _operators_settings(url)
    calls = ", ".join(
        f"set_config('{name}', '{value}', false)"
        for name, value in settings.items()
        if name not in made
    )
    return f"SELECT {calls}" if calls else None


def apply_settings(
    connection: psycopg.Connection[Any], url: str, settings: Mapping[str, str]
) -> None:
    """Make the settings of a new connection, or close it."""
    statement = settings_statement(url, settings)
    if statement is None:
        return
    former = connection.autocommit
    try:
        connection.autocommit = True
        connection.execute(statement.encode())
        connection.autocommit = former
    except BaseException:
        connection.close()
        raise


def apply_settings_in_pool(pool: Pool, url: str, settings: Mapping[str, str]) -> None:
    """Make the settings of each connection that a pool opens, at one exchange for each."""
    statement = settings_statement(url, settings)

    def apply(connection: Any, _record: object) -> None:
        former = connection.autocommit
        try:
            # A transaction that is rolled back would take them back.
            connection.autocommit = True
            cursor = connection.cursor()
            cursor.execute(statement)
            cursor.close()
            connection.autocommit = former
        except BaseException:
            connection.close()
            raise

    if statement is not None:
        event.listen(pool, "connect", apply)


def _operators_settings(url: str) -> frozenset[str]:
    """Return the names of the settings in the options of the URL, or else in PGOPTIONS."""
    options = parse_postgres_url(url).get("options")
    if options is None:
        defaults = {option.keyword: option.val for option in Conninfo.get_defaults()}
        options = (defaults[b"options"] or b"").decode()
    found = (_SETTING.fullmatch(word) for word in _WORD.findall(options))
    return frozenset(one["name"].replace("-", "_").lower() for one in found if one is not None)
