"""Check what becomes of sessions, links and the scope `view` in an older version and after it."""

from alembic import command

from tests.migrations.test_upgrades import OWN, alembic, run

KEYS = {
    "ci": ("key", ["publish"]),
    "views": ("key", ["view"]),
    "views and more": ("key", ["audit", "view"]),
    "a person": ("session", ["admin"]),
}


def test_an_older_version_has_no_session_and_no_scope_view(database: str) -> None:
    run(database, "INSERT INTO organisations (id, name) VALUES (%s, 'default')", OWN)
    for number, (name, (kind, scopes)) in enumerate(KEYS.items()):
        run(
            database,
            "INSERT INTO api_keys (id, organisation_id, name, key_hash, scopes, kind, ends_at)"
            " VALUES (%s, %s, %s, %s, %s, %s, now())",
            f"00000000-0000-7000-8000-0000000001{number:02}",
            OWN,
            name,
            bytes([number]),
            scopes,
            kind,
        )
    run(
        database,
        "INSERT INTO sign_in_links (token_hash, organisation_id, kind, name, scopes, expires_at,"
        " session_s) VALUES ('x', %s, 'console', 'a person', '{view}', now(), 60)",
        OWN,
    )
    with alembic(database) as config:
        command.downgrade(config, "0028")
    found = run(database, "SELECT name, scopes, revoked_at IS NULL FROM api_keys ORDER BY id")
    assert found == [
        ("ci", ["publish"], True),
        ("views", [], False),
        ("views and more", ["audit"], True),
    ]
    with alembic(database) as config:
        command.upgrade(config, "head")
    kinds = run(database, "SELECT kind, parent_id, ends_at FROM api_keys")
    assert kinds == [("key", None, None)] * 3
    assert run(database, "SELECT count(*) FROM sign_in_links") == [(0,)]
