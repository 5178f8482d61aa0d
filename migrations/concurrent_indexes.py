"""Build indexes while others write to the table.

A revision does this before anything else, because each statement is a transaction of its own.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from alembic import op
from sqlalchemy import Connection, text

# The build waits for older transactions, and no statement of others waits for it meanwhile. It may
# take longer than statements of this role.
_LIMITS = {"lock_timeout": "2min", "statement_timeout": "0", "transaction_timeout": "0"}
_PRESENT = text(
    "SELECT name, current_setting(name) FROM pg_settings WHERE name = ANY (CAST(:names AS text[]))"
)
_SET = text("SELECT set_config(:name, :value, false)")
_IS_VALID = text("SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(:name)")


def build_index(name: str, on: str) -> None:
    """Build an index on a table and its columns, unless an earlier try has completed it.

    What an interrupted build left is dropped first: it is written to, and never read.
    """
    with _outside_transactions() as connection:
        valid = connection.scalar(_IS_VALID, {"name": name})
        if valid is False:
            connection.execute(text(f"DROP INDEX CONCURRENTLY {name}"))
        if not valid:
            connection.execute(text(f"CREATE INDEX CONCURRENTLY {name} ON {on}"))


def replace_index(name: str, on: str, *, temporary: str) -> None:
    """Build an index beside the one of this name, and put it in its place.

    The revision's own transaction takes the lock on the table, and only for the change of names.
    """
    build_index(temporary, on)
    op.execute(f"DROP INDEX {name}")
    op.execute(f"ALTER INDEX {temporary} RENAME TO {name}")


@contextmanager
def _outside_transactions() -> Iterator[Connection]:
    with op.get_context().autocommit_block():
        connection = op.get_bind()
        # PostgreSQL 16 has no transaction_timeout.
        former = {row[0]: row[1] for row in connection.execute(_PRESENT, {"names": [*_LIMITS]})}
        _set(connection, {name: _LIMITS[name] for name in former})
        try:
            yield connection
        finally:
            _set(connection, former)


def _set(connection: Connection, settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        connection.execute(_SET, {"name": name, "value": value})
