"""Check which reasons of older versions an upgrade forgets."""

from alembic import command

from tests.migrations.test_upgrades import OWN, alembic, run

ROOM = 43
SUBSCRIPTIONS = {
    "approved": ("active", "agreement 17/2026", None),
    "unreadable": ("active", "its deliveries are held: no key", "its deliveries are held: no key"),
    "suspended": ("suspended", "too loud", "too loud"),
    "disabled": ("disabled", "gone", "gone"),
}


def test_active_subscriptions_keep_no_reason_of_a_decision(database: str) -> None:
    with alembic(database) as config:
        command.downgrade(config, "0052")
    run(database, "INSERT INTO organisations (id, name) VALUES (%s, 'own')", OWN)
    run(
        database,
        "INSERT INTO rooms (id, organisation_id, name, delivery_delay_ms,"
        " delivery_delay_multiplier, delivery_attempts) VALUES (%s, %s, 'room', 1000, 2, 5)",
        ROOM,
        OWN,
    )
    for number, (name, (status, reason, _)) in enumerate(SUBSCRIPTIONS.items()):
        run(
            database,
            "INSERT INTO subscriptions (id, room_id, organisation_id, name, type, status,"
            " status_reason) VALUES (%s, %s, %s, %s, 'PULL', %s, %s)",
            f"00000000-0000-7000-8000-00000001{number:04}",
            ROOM,
            OWN,
            name,
            status,
            reason,
        )
    with alembic(database) as config:
        command.upgrade(config, "head")
    found = run(database, "SELECT name, status_reason FROM subscriptions")
    assert dict(found) == {name: after for name, (_, _, after) in SUBSCRIPTIONS.items()}
