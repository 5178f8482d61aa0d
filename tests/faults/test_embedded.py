"""Test the embedded PostgreSQL after kills, as every user, and in unusual folders."""

import asyncio
import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine, text

from rooms.db.connection import open_connection
from rooms.local import (
    EmbeddedPostgres,
    InitialisationError,
    embedded_url,
    postgres,
    process_table,
    run_as,
)
from rooms.local.run_as import RunAs, RunAsMethod
from tests.faults.supervisor_stage import PATIENCE_S, Stage, line_of, staged, until
from tests.support.local_servers import temporary_postgres
from tests.support.sqlalchemy_urls import sqlalchemy_url

linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="needs /proc and the kernel's death signal"
)
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root has other users to run as")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with staged(tmp_path / "data") as stage:
        yield stage


def postmaster(data: Path) -> int:
    return int((data / "postgres/postmaster.pid").read_text().split()[0])


def rows(url: str) -> list[int]:
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute("SELECT n FROM kept ORDER BY n")]


def keep_a_row(url: str, number: int) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (n int)")
        connection.execute("INSERT INTO kept VALUES (%s)", [number])


@contextmanager
def abandoned(server: EmbeddedPostgres, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server without a supervisor, as `kill -9` leaves it outside Linux."""
    server.prepare()
    with log.open("ab") as file:
        process = subprocess.Popen(
            run_as.launch_command(server.argv(), run_as=server.run_as),
            stdout=file,
            stderr=file,
            env=server.environment,
            cwd="/",
            start_new_session=True,
        )
    try:
        until(server.is_ready, "PostgreSQL")
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGQUIT)
        process.wait(PATIENCE_S)


def ready_url(supervisor: subprocess.Popen[bytes]) -> str:
    assert supervisor.stdout is not None
    word, url = line_of(supervisor.stdout).split()
    assert word == "ready"
    return url


def test_a_killed_postgres_comes_back_with_what_was_committed(stage: Stage) -> None:
    """The new postmaster has the same address and the committed rows; its siblings kept running."""
    supervisor = stage.supervisor([stage.child("api")], database_url=None)
    url = ready_url(supervisor)
    child = stage.report()
    server = EmbeddedPostgres(stage.data)
    for number in range(2):
        keep_a_row(url, number)
        killed = postmaster(stage.data)
        os.kill(killed, signal.SIGKILL)
        assert process_table.wait_gone(killed, PATIENCE_S)
        until(server.is_ready, "PostgreSQL")
        assert rows(url) == list(range(number + 1))
        assert postmaster(stage.data) != killed
    assert process_table.start_token(child.pid) is not None


def test_ctrl_c_shuts_postgres_down_cleanly_after_its_clients(stage: Stage) -> None:
    """No recovery is needed afterwards, and no pid file is left."""
    supervisor = stage.supervisor([stage.child("api"), stage.child("worker")], database_url=None)
    ready_url(supervisor)
    children = stage.reports(2)
    server = postmaster(stage.data)
    os.killpg(supervisor.pid, signal.SIGINT)
    assert children["api"].says() == "api stopping"
    assert children["worker"].says() == "worker stopping"
    assert supervisor.wait(PATIENCE_S) == 0
    assert process_table.start_token(server) is None
    assert not (stage.data / "postgres/postmaster.pid").exists()
    assert "database system is shut down" in (stage.data / "log/postgres.log").read_text()


@linux_only
def test_a_killed_supervisor_takes_postgres_with_it_and_the_next_one_starts(stage: Stage) -> None:
    """No process of the first run is left, and the second run has its rows."""
    first = stage.supervisor([stage.child("api")], database_url=None)
    url = ready_url(first)
    child, server = stage.report(), postmaster(stage.data)
    keep_a_row(url, 7)
    first.kill()
    assert child.says() == ""
    assert process_table.wait_gone(server, PATIENCE_S)
    second = stage.supervisor([stage.child("api")], database_url=None)
    assert ready_url(second) == url
    assert stage.report().pid != child.pid
    assert rows(url) == [7]


def test_an_orphaned_postmaster_is_stopped_before_the_next_start(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "data")
    with abandoned(server, tmp_path / "log") as orphan:
        keep_a_row(server.url, 1)
        with temporary_postgres(server.data) as url:
            assert orphan.wait(PATIENCE_S) == 0
            assert rows(url) == [1]


@linux_only
def test_backends_that_outlive_their_postmaster_are_ended(tmp_path: Path) -> None:
    """A backend in a long computation notices nothing. Its shared memory would prevent a start."""
    server = EmbeddedPostgres(tmp_path / "data")
    with (
        abandoned(server, tmp_path / "log") as killed,
        closing(psycopg.connect(server.url, autocommit=True)) as connection,
    ):
        busy = connection.info.backend_pid
        connection.pgconn.send_query(b"SELECT count(*) FROM generate_series(1, 1e10::bigint)")
        connection.pgconn.flush()
        killed.kill()
        killed.wait(PATIENCE_S)
        with temporary_postgres(server.data) as url:
            assert process_table.wait_gone(busy, PATIENCE_S)
            keep_a_row(url, 3)
            assert rows(url) == [3]


def test_zombie_postmaster_does_not_prevent_a_start(tmp_path: Path) -> None:
    """A parent that reaps its children late leaves a zombie, which still has its process id."""
    server = EmbeddedPostgres(tmp_path / "data")
    with abandoned(server, tmp_path / "log") as killed:
        keep_a_row(server.url, 4)
        killed.kill()
        until(
            lambda: process_table.start_token(killed.pid) is None, "the killed postmaster has ended"
        )
        assert process_table.pid_exists(killed.pid)
        with temporary_postgres(server.data) as url:
            assert rows(url) == [4]


def test_stale_pid_file_of_a_reused_id_does_not_prevent_a_start(tmp_path: Path) -> None:
    """The process id is that of this test, which must survive too."""
    data = tmp_path / "data"
    with temporary_postgres(data) as url:
        keep_a_row(url, 5)
        left = (data / "postgres/postmaster.pid").read_text().split("\n", 1)[1]
    (data / "postgres/postmaster.pid").write_text(f"{os.getpid()}\n{left}")
    lock = postgres.socket_dir(data) / f".s.PGSQL.{postgres.POSTGRES_PORT}.lock"
    lock.write_text(f"{os.getpid()}\n{left}")
    with temporary_postgres(data) as url:
        assert rows(url) == [5]


def test_interrupted_initdb_is_repeated(tmp_path: Path) -> None:
    partial = tmp_path / "data/postgres.partial"
    partial.mkdir(parents=True)
    (partial / "PG_VERSION").write_text("18\n")
    with temporary_postgres(tmp_path / "data") as url:
        keep_a_row(url, 1)
        assert rows(url) == [1]
    assert not partial.exists()


def test_foreign_folder_is_not_changed(tmp_path: Path) -> None:
    foreign = tmp_path / "data/postgres/holiday.jpg"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("kept")
    with pytest.raises(InitialisationError, match="ROOMS_DATA"):
        EmbeddedPostgres(tmp_path / "data").prepare()
    assert foreign.read_text() == "kept"


def test_other_major_version_is_refused_with_advice(tmp_path: Path) -> None:
    with temporary_postgres(tmp_path / "data"):
        pass
    (tmp_path / "data/postgres/PG_VERSION").write_text("16\n")
    with pytest.raises(
        InitialisationError, match=r"PostgreSQL 16, this is 18: upgrade it with pg_upgrade"
    ):
        EmbeddedPostgres(tmp_path / "data").prepare()


def test_long_path_moves_the_socket_to_a_private_folder(tmp_path: Path) -> None:
    data = tmp_path / ("long" * 30)
    with temporary_postgres(data) as url:
        keep_a_row(url, 1)
        assert rows(url) == [1]
    folder = postgres.socket_dir(data)
    assert not folder.is_relative_to(data)
    assert folder.stat().st_mode & 0o077 == 0
    folder.rmdir()


async def open_and_close(url: str) -> None:
    async with open_connection(url, name="rooms test"):
        pass


@pytest.mark.parametrize("name", ["a, b", "a b", "'%20\"#?&=+"])
def test_server_starts_in_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    data = tmp_path / name
    with temporary_postgres(data) as url:
        keep_a_row(url, 1)
        engine = create_engine(sqlalchemy_url(url))
        try:
            with engine.connect() as connection:
                assert connection.scalar(text("SELECT count(*) FROM kept")) == 1
        finally:
            engine.dispose()
        asyncio.run(open_and_close(url))
    folder = postgres.socket_dir(data)
    if not folder.is_relative_to(data):
        folder.rmdir()


def test_symlink_as_socket_folder_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (data / "socket").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InitialisationError, match="is not a folder of this user"):
        EmbeddedPostgres(data).prepare()


def test_server_listens_only_on_a_private_socket(tmp_path: Path) -> None:
    with temporary_postgres(tmp_path / "data") as url, psycopg.connect(url) as connection:
        shown = {
            name: connection.execute(f"SHOW {name}").fetchone()
            for name in ("listen_addresses", "fsync", "synchronous_commit", "max_connections")
        }
        assert shown == {
            "listen_addresses": ("",),
            "fsync": ("on",),
            "synchronous_commit": ("on",),
            "max_connections": ("200",),
        }
        assert (tmp_path / "data/socket").stat().st_mode & 0o077 == 0


def unprivileged() -> tuple[int, int]:
    entry = pwd.getpwnam("nobody")
    return entry.pw_uid, entry.pw_gid


def worn(way: RunAsMethod) -> RunAs:
    if way is RunAsMethod.NAMESPACE:
        found = run_as.as_namespace_user()
        assert found is not None
        return found
    uid, gid = unprivileged()
    return RunAs(method=way, uid=uid, gid=gid, owner_uid=uid, owner_gid=gid)


def possible(way: RunAsMethod, data: Path) -> RunAs:
    """Skip the test if the container forbids this way to change the user."""
    chosen = worn(way)
    data.mkdir(parents=True)
    if not run_as.can_run(chosen, data, EmbeddedPostgres(data).program):
        pytest.skip(f"{way} is not allowed on this machine")
    return chosen


@linux_only
@root_only
@pytest.mark.parametrize("way", [RunAsMethod.NAMESPACE, RunAsMethod.ACCOUNT_OVERRIDE])
def test_root_runs_the_server_in_a_private_folder(tmp_path: Path, way: RunAsMethod) -> None:
    """The user has no rights, and the folder is a 0700 folder of root."""
    tmp_path.chmod(0o700)
    data = tmp_path / "closed/data"
    data.parent.mkdir(mode=0o700)
    chosen = possible(way, data)
    with temporary_postgres(data, run_as=chosen) as url:
        keep_a_row(url, 1)
        status = Path(f"/proc/{postmaster(data)}/status").read_text()
        allowed = {RunAsMethod.NAMESPACE: 0, RunAsMethod.ACCOUNT_OVERRIDE: 1 << 1}[way]
        assert f"CapEff:\t{allowed:016x}\n" in status
        assert f"Uid:\t{chosen.owner_uid}\t{chosen.owner_uid}\t" in status


@linux_only
@root_only
@pytest.mark.parametrize("way", [RunAsMethod.NAMESPACE, RunAsMethod.ACCOUNT_OVERRIDE])
def test_server_stops_when_its_parent_dies(tmp_path: Path, way: RunAsMethod) -> None:
    """The change of user must not cost the death signal."""
    server = EmbeddedPostgres(tmp_path / "data", run_as=possible(way, tmp_path / "data"))
    server.prepare()
    starter = (
        "import json, subprocess, sys; from pathlib import Path;"
        "from rooms.local import EmbeddedPostgres;"
        "from rooms.local.run_as import RunAs, RunAsMethod;"
        "fields = json.loads(sys.argv[2]); method = RunAsMethod(fields.pop('method'));"
        "s = EmbeddedPostgres(Path(sys.argv[1]), run_as=RunAs(method=method, **fields));"
        "subprocess.run(s.command(), env=s.environment, cwd='/', stderr=subprocess.DEVNULL)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", starter, str(server.data), identity_json(server)]
    ) as process:
        until(server.is_ready, "PostgreSQL")
        pid = postmaster(server.data)
        process.kill()
        assert process_table.wait_gone(pid, PATIENCE_S)


def identity_json(server: EmbeddedPostgres) -> str:
    import json
    from dataclasses import asdict

    assert server.run_as is not None
    return json.dumps(asdict(server.run_as))


@linux_only
@root_only
def test_root_may_change_the_user_of_the_server(tmp_path: Path) -> None:
    """The files change their owner, and nothing is lost."""
    data = tmp_path / "data"
    namespace = possible(RunAsMethod.NAMESPACE, data)
    other = worn(RunAsMethod.ACCOUNT_OVERRIDE)
    if not run_as.can_run(other, data, EmbeddedPostgres(data).program):
        pytest.skip("no second way on this machine")
    for number, chosen in enumerate((namespace, other, namespace)):
        with temporary_postgres(data, run_as=chosen) as url:
            keep_a_row(url, number)
            assert rows(url) == list(range(number + 1))
        assert (data / "postgres").stat().st_uid == chosen.owner_uid


def test_some_user_can_run_the_server(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path)
    chosen = run_as.choose_run_as(tmp_path, server.program)
    assert chosen.uid != 0
    assert embedded_url(tmp_path) == server.url
