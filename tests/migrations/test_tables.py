"""The tables in Python are those that the migrations make."""

import pytest
from sqlalchemy import Column, create_engine, inspect
from sqlalchemy.dialects import postgresql

from rooms.db.tables import metadata
from tests.support.sqlalchemy_urls import sqlalchemy_url

_DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call]


def declared(column: Column[object]) -> tuple[str, bool]:
    return str(column.type.compile(_DIALECT)).upper(), bool(column.nullable)


@pytest.fixture
def found(database: str) -> dict[str, dict[str, tuple[str, bool]]]:
    engine = create_engine(sqlalchemy_url(database))
    statement = """
        SELECT c.relname, a.attname, upper(format_type(a.atttypid, a.atttypmod)), NOT a.attnotnull
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = 'public' AND c.relkind IN ('r', 'p') AND NOT c.relispartition AND a.attnum > 0
            AND NOT a.attisdropped AND c.relname <> 'alembic_version'
        ORDER BY c.relname, a.attnum
    """
    tables: dict[str, dict[str, tuple[str, bool]]] = {}
    with engine.connect() as connection:
        for table, column, kind, nullable in connection.exec_driver_sql(statement):
            tables.setdefault(table, {})[column] = kind, nullable
    engine.dispose()
    return tables


def test_columns_are_those_of_the_migrated_database(
    found: dict[str, dict[str, tuple[str, bool]]],
) -> None:
    expected = {
        name: {column.name: declared(column) for column in table.columns}
        for name, table in metadata.tables.items()
    }
    assert found == expected
    assert {name: list(columns) for name, columns in found.items()} == {
        name: list(columns) for name, columns in expected.items()
    }


def test_primary_keys_are_those_of_the_migrated_database(database: str) -> None:
    engine = create_engine(sqlalchemy_url(database))
    inspector = inspect(engine)
    try:
        for name, table in metadata.tables.items():
            assert inspector.get_pk_constraint(name)["constrained_columns"] == [
                c.name for c in table.primary_key
            ]
    finally:
        engine.dispose()


def test_every_table_that_grows_has_its_room_in_the_primary_key() -> None:
    of_no_room = {
        "organisations", "api_keys", "rooms", "jobs", "writers", "processes", "upkeep_marks",
        "election_members", "election_partitions", "election_terms",
        "magazines", "magazine_pointers", "magazine_entries", "handler_queues", "queues",
        "log_exports", "log_export_writers", "analysis_runs", "analysis_rows", "due_buckets", "write_probes",
        "journal", "journal_heads", "signing_keys", "receipt_keys", "usage_mark", "activity_minutes",
        "quota_days", "quota_stored", "sign_in_links",
    }  # fmt: skip
    for name, table in metadata.tables.items():
        if name not in of_no_room:
            assert next(iter(table.primary_key)).name == "room_id", name
