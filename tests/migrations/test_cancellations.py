"""Check that cancellations that failed before an upgrade go on."""

from alembic import command

from rooms.domain.job import JobKind, JobState
from tests.migrations.test_upgrades import OWN, alembic, run

JOB = "00000000-0000-7000-8000-000000000100"
OTHER = "00000000-0000-7000-8000-000000000101"


def test_failed_cancellations_are_queued_again(database: str) -> None:
    with alembic(database) as config:
        command.downgrade(config, "0045")
    run(database, "INSERT INTO organisations (id, name) VALUES (%s, 'own')", OWN)
    for identity, kind in ((JOB, JobKind.CANCEL_UNGRANTED), (OTHER, JobKind.REPLAY)):
        run(
            database,
            "INSERT INTO jobs (id, organisation_id, room_id, kind, state, error, finished_at)"
            " VALUES (%s, %s, 41, %s, 'failed', 'ValueError', now())",
            identity,
            OWN,
            kind.value,
        )
    with alembic(database) as config:
        command.upgrade(config, "head")
    states = run(database, "SELECT id::text, state, error, finished_at IS NULL FROM jobs")
    assert sorted(states) == [
        (JOB, JobState.QUEUED, None, True),
        (OTHER, JobState.FAILED, "ValueError", False),
    ]
