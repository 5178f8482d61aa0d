"""Build indexes while others write to the table.

A revision does this before anything else, because each statement is a transaction of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from alembic import op
from sqlalchemy import Connection, text

# The build waits for older transactions, and no statement of others waits for it meanwhile.
_PATIENCE = "2min"
_SET_TIMEOUT = text("SELECT set_config('lock_timeout', :value, false)")
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
        short = connection.scalar(text("SHOW lock_timeout"))
        connection.execute(_SET_TIMEOUT, {"value": _PATIENCE})
        try:
            yield connection
        finally:
            connection.execute(_SET_TIMEOUT, {"value": short})
