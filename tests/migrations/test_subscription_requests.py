"""Check which subscriptions of an older version count as ended before their approval."""

from alembic import command

from tests.migrations.test_upgrades import OWN, TENANT, alembic, run

ROOM = 41
# By name: its status, and those in its history.
SUBSCRIPTIONS = {
    "rejected": ("rejected", ["pending", "rejected"]),
    "withdrawn": ("terminated", ["pending", "pending", "terminated"]),
    "deleted": ("deleted", ["pending", "pending"]),
    "pending": ("pending", ["pending"]),
    "approved": ("terminated", ["pending", "active", "terminated"]),
    "approved, suspended": ("deleted", ["pending", "suspended", "suspended"]),
    "granted": ("deleted", ["active", "active"]),
    "without a history": ("terminated", []),
}


def identity(number: int) -> str:
    return f"00000000-0000-7000-8000-0000000001{number:02}"


def marked(url: str) -> list[str]:
    found = run(url, "SELECT name FROM subscriptions WHERE never_approved ORDER BY id")
    return [name for (name,) in found]


def test_requests_that_ended_before_are_marked(database: str) -> None:
    with alembic(database) as config:
        command.downgrade(config, "0042")
    for owner, name in ((OWN, "own"), (TENANT, "tenant")):
        run(database, "INSERT INTO organisations (id, name) VALUES (%s, %s)", owner, name)
    run(
        database,
        "INSERT INTO rooms (id, organisation_id, name, delivery_delay_ms,"
        " delivery_delay_multiplier, delivery_attempts) VALUES (%s, %s, 'room', 1000, 2, 5)",
        ROOM,
        OWN,
    )
    for number, (name, (status, steps)) in enumerate(SUBSCRIPTIONS.items()):
        run(
            database,
            "INSERT INTO subscriptions (room_id, id, name, type, organisation_id, status)"
            " VALUES (%s, %s, %s, 'PULL', %s, %s)",
            ROOM,
            identity(number),
            name,
            TENANT,
            status,
        )
        for step in steps:
            run(
                database,
                "INSERT INTO subscription_history"
                " (room_id, subscription_id, action, status, snapshot)"
                " VALUES (%s, %s, 'changed', %s, '{}')",
                ROOM,
                identity(number),
                step,
            )
    with alembic(database) as config:
        command.upgrade(config, "head")
    assert marked(database) == ["rejected", "withdrawn", "deleted"]
    with alembic(database) as config:
        command.downgrade(config, "0042")
        command.upgrade(config, "head")
    assert marked(database) == ["rejected", "withdrawn", "deleted"]
