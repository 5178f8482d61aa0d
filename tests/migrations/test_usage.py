"""Check that usage keeps its sums by an upgrade and back; what was counted has no application."""

from alembic import command

from tests.migrations.test_upgrades import OWN, TENANT, alembic, run

_COLUMNS = "room_id, hour, owner_id, organisation_id, event_type, messages, bytes, purged"
_HOUR = "2026-03-01T12:00:00Z"


def test_former_usage_has_no_application_and_none_is_lost_on_the_way_back(database: str) -> None:
    with alembic(database) as config:
        command.downgrade(config, "0032")
    for owner, event_type, messages in ((OWN, "a", 1), (OWN, "b", 2), (TENANT, "a", 4)):
        run(
            database,
            f"INSERT INTO usage_hours ({_COLUMNS}) VALUES (7, %s, %s, %s, %s, %s, 10, 3)",
            _HOUR, owner, OWN, event_type, messages,
        )  # fmt: skip
    before = run(database, f"SELECT {_COLUMNS} FROM usage_hours ORDER BY 3, 5")
    with alembic(database) as config:
        command.upgrade(config, "head")
    assert run(database, f"SELECT {_COLUMNS} FROM usage_hours ORDER BY 3, 5") == before
    assert run(database, "SELECT DISTINCT application FROM usage_hours") == [("",)]
    for application in ("registry", "*"):
        run(
            database,
            f"INSERT INTO usage_hours ({_COLUMNS}, application) VALUES (7, %s, %s, %s, 'a', 100, 5, 0, %s)",
            _HOUR, OWN, OWN, application,
        )  # fmt: skip
    with alembic(database) as config:
        command.downgrade(config, "0032")
    found = run(
        database, "SELECT messages, bytes, purged FROM usage_hours ORDER BY owner_id, event_type"
    )
    assert found == [(201, 20, 3), (2, 10, 3), (4, 10, 3)]
    with alembic(database) as config:
        command.upgrade(config, "head")
    assert run(database, "SELECT sum(messages)::int8 FROM usage_hours") == [(207,)]
