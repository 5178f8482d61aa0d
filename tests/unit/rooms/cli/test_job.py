"""Test the commands that start jobs: their requests, and how they end."""

import io
from collections.abc import Callable

import pytest

from rooms.cli.client import ApiClient
from rooms.cli.job import follow_job
from tests.support.cli_runner import Terminal
from tests.support.fake_api import KEY, Answer, FakeRooms, Seen
from tests.support.sleep_recorder import recorded_pauses

MESSAGE = "01900000-0000-7000-8000-0000000000aa"


def interfere(fake: FakeRooms) -> Callable[[Seen], Answer | None]:
    """Answer the routes of these tests."""
    job = {"job_id": fake.identity(8), "kind": "restore", "state": "queued"}

    def answer(seen: Seen) -> Answer | None:
        match seen.method, seen.path.rsplit("/", 1)[-1]:
            case (
                "POST",
                "restore"
                | "clear"
                | "replay"
                | "recover"
                | "doctor"
                | "retention-preview"
                | "runs",
            ):
                return 202, job
            case "POST", "cancel":
                return 200, job | {
                    "id": fake.identity(8),
                    "state": "cancelled",
                    "done": 1,
                    "total": 2,
                }
            case "GET", "jobs":
                return 200, {
                    "items": [job | {"id": fake.identity(8), "done": 1, "total": 2}],
                    "next_cursor": None,
                }
        return None

    return answer


@pytest.fixture(autouse=True)
def orders(fake: FakeRooms) -> None:
    fake.rooms.append({"id": 1000, "name": "orders"})
    fake.subscriptions.append(
        {"id": fake.identity(1), "name": "crm", "type": "PUSH", "status": "active"}
    )
    fake.jobs.extend(
        {"id": fake.identity(8), "state": state, "done": 1, "total": 2}
        for state in ("running", "done")
    )
    fake.interfere = interfere(fake)


def test_a_restore_of_a_room(terminal: Terminal, fake: FakeRooms) -> None:
    done = terminal.run(
        "restore",
        "orders",
        "--include-expired",
        "--since",
        "2026-01-01T00:00:00Z",
        "--states",
        "held",
    )
    assert done.exit_code == 0, done.output
    (seen,) = fake.sent("POST", "/v1/rooms/1000/restore")
    assert seen.body == {
        "since": "2026-01-01T00:00:00Z",
        "states": ["held"],
        "include_expired": True,
    }
    assert f"rooms job {fake.identity(8)} --follow" in done.output


def test_a_restore_of_a_message_is_followed_to_its_end(terminal: Terminal, fake: FakeRooms) -> None:
    done = terminal.run("--json", "restore", "--message", MESSAGE, "--follow")
    assert done.exit_code == 0, done.output
    (seen,) = fake.sent("POST", f"/v1/messages/{MESSAGE}/restore")
    assert seen.body == {}
    assert '"done"' in done.output
    assert len(fake.sent("GET", "/v1/jobs/.*")) == 2


class Screen(io.StringIO):
    """Collect what a terminal shows."""

    def isatty(self) -> bool:
        return True


def test_progress_bar_is_shown_on_a_terminal(
    fake: FakeRooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only on a terminal, and only without --json."""
    recorded_pauses(monkeypatch, "rooms.cli.job")
    for name, value in (("TERM", "xterm"), ("COLUMNS", "100")):
        monkeypatch.setenv(name, value)
    job = {"id": fake.identity(8), "kind": "restore", "state": "queued", "done": 0, "total": None}

    def seen(*, shown: bool) -> str:
        fake.jobs.clear()
        fake.jobs.extend(
            job | {"state": state, "done": 450, "total": 1000} for state in ("running", "done")
        )
        with monkeypatch.context() as patched, ApiClient(fake.url, KEY) as client:
            patched.setattr("sys.stderr", screen := Screen())
            assert follow_job(client, job, shown=shown)["state"] == "done"
        return screen.getvalue()

    assert "450/1000" in seen(shown=True)
    assert seen(shown=False) == ""


def test_a_job_is_followed_over_a_restart_of_the_service(
    terminal: Terminal, fake: FakeRooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated command would start the job a second time."""
    pauses = recorded_pauses(monkeypatch, "rooms.cli.job")
    usual, statuses = interfere(fake), iter([503, 429, 503])

    def restarting(seen: Seen) -> Answer | None:
        if "/jobs/" in seen.path and (status := next(statuses, None)) is not None:
            return status, {"title": "shutting down"}
        return usual(seen)

    fake.interfere = restarting
    done = terminal.run("restore", "--message", MESSAGE, "--follow")
    assert done.exit_code == 0, done.output
    assert "done" in done.stdout
    assert f"rooms job {fake.identity(8)} --follow" in done.stderr
    assert [one for one in pauses if one >= 1] == [1.0] * 3
    assert done.stderr.count("shutting down; asking again") == 1
    assert len(fake.sent("POST", f"/v1/messages/{MESSAGE}/restore")) == 1

    def gone(seen: Seen) -> Answer | None:
        return (404, {"title": "gone"}) if "/jobs/" in seen.path else usual(seen)

    fake.interfere = gone
    assert terminal.run("restore", "--message", MESSAGE, "--follow").exit_code == 1


def test_restore_takes_either_room_or_message(terminal: Terminal, fake: FakeRooms) -> None:
    for arguments in (
        [],
        ["orders", "--message", MESSAGE],
        ["--message", MESSAGE, "--since", "2026-01-01T00:00:00Z"],
    ):
        assert terminal.run("restore", *arguments).exit_code == 2
    assert fake.sent("POST", ".*") == []


def test_a_clear_is_confirmed_by_the_rooms_name(terminal: Terminal, fake: FakeRooms) -> None:
    assert terminal.run("clear", "orders", "--confirm", "other").exit_code == 1
    assert terminal.run("clear", "orders", stdin="n\n").exit_code == 1
    assert fake.sent("POST", ".*") == []
    for arguments in (["--confirm", "orders"], ["--yes"]):
        fake.jobs.append({"id": fake.identity(8), "state": "queued", "done": 0, "total": None})
        assert terminal.run("clear", "orders", *arguments).exit_code == 0
    assert [seen.query for seen in fake.sent("POST", "/v1/rooms/1000/clear")] == [
        {"confirm": "orders"}
    ] * 2


def test_a_replay(terminal: Terminal, fake: FakeRooms) -> None:
    done = terminal.run(
        "replay",
        "orders/crm",
        "--since",
        "2026-01-01T00:00:00Z",
        "--ordering-key",
        "o",
        "--business-key",
        "b",
        "--event-type",
        "paid",
        "--rate",
        "5",
        "--follow",
    )
    assert done.exit_code == 0, done.output
    (seen,) = fake.sent("POST", f"/v1/subscriptions/{fake.identity(1)}/replay")
    assert seen.body == {
        "since": "2026-01-01T00:00:00Z",
        "event_types": ["paid"],
        "ordering_keys": ["o"],
        "business_keys": ["b"],
        "rate_per_s": 5.0,
    }
    assert terminal.run("replay", "orders/crm").exit_code == 2


def test_failed_resend_is_reported(terminal: Terminal, fake: FakeRooms) -> None:
    fake.jobs.clear()
    fake.jobs.append(
        {"id": fake.identity(8), "state": "failed", "error": "no broker", "done": 0, "total": 2}
    )
    done = terminal.run("broker", "resend", "--follow")
    assert done.exit_code == 1
    assert "no broker" in done.output
    assert len(fake.sent("POST", "/v1/recover")) == 1


@pytest.mark.parametrize(("left", "code"), [(0, 0), (2, 1)])
def test_the_doctor_runs_as_a_job(
    terminal: Terminal, fake: FakeRooms, left: int, code: int
) -> None:
    fake.jobs[-1]["result"] = {"open": left, "findings": []}
    assert terminal.run("doctor", "--job", "--repair").exit_code == code
    assert fake.sent("POST", "/v1/doctor")[0].body == {"repair": True}


@pytest.mark.parametrize(("incomplete", "code"), [(False, 0), (True, 3)])
def test_the_analysis_runs_as_a_job(
    terminal: Terminal, fake: FakeRooms, code: int, *, incomplete: bool
) -> None:
    fake.jobs[-1]["result"] = {"status": None, "lines": [], "incomplete": incomplete}
    assert terminal.run("analyze", "--job", "--full").exit_code == code
    assert fake.sent("POST", "/v1/analysis/runs")[0].body == {"full": True}
    assert terminal.run("analyze", "--job", "--follow").exit_code == 2


def test_retention_is_previewed_by_a_job(terminal: Terminal, fake: FakeRooms) -> None:
    fake.jobs[-1]["result"] = {"days": 7, "total": 0, "ranges": []}
    terminal.done("retention", "--job", "--days", "7")
    assert fake.sent("POST", "/v1/retention-preview")[0].body == {"days": 7}


def test_job_is_shown_by_its_id_and_cancelled(terminal: Terminal, fake: FakeRooms) -> None:
    for shown in (["job"], ["job", "show"]):
        assert terminal.run(*shown, fake.identity(8)).exit_code == 0
    done = terminal.run("job", "cancel", fake.identity(8))
    assert done.exit_code == 0, done.output
    assert "cancelled" in done.output
    assert len(fake.sent("POST", f"/v1/jobs/{fake.identity(8)}/cancel")) == 1


def test_jobs_are_listed(terminal: Terminal, fake: FakeRooms) -> None:
    done = terminal.run("jobs", "--kind", "restore", "--state", "queued", "--room", "orders")
    assert done.exit_code == 0, done.output
    (seen,) = fake.sent("GET", "/v1/jobs")
    assert {name: seen.query[name] for name in ("kind", "state", "room_id")} == {
        "kind": "restore", "state": "queued", "room_id": "1000",
    }  # fmt: skip
    assert fake.identity(8) in done.output
