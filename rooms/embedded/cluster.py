"""The data folder of the embedded PostgreSQL: made once, cleared of what a crash left, and tuned at every start."""

import hashlib
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from rooms.embedded import processes, tuning
from rooms.embedded.binaries import MAJOR, Binaries
from rooms.embedded.errors import InitialisationError
from rooms.embedded.identity import Identity, launched

SUPERUSER = "rooms"
PORT = 5432
ENVIRONMENT = {"LC_ALL": "C", "TZ": "UTC", "PATH": os.defpath}
_INCLUDE = "rooms.conf"
# sun_path holds 104 bytes on the strictest system, the socket's own name takes 14 of them.
_LONGEST_SOCKET_FOLDER = 88
_INITDB_TIMEOUT_S = 120


def socket_folder(data: Path) -> Path:
    """Where the socket lies: in the data folder, or by a short name that depends on it alone under the temporary one."""
    inside = data.absolute() / "socket"
    if len(os.fsencode(inside)) <= _LONGEST_SOCKET_FOLDER:
        return inside
    name = f"rooms-{os.geteuid()}-{hashlib.sha256(os.fsencode(inside)).hexdigest()[:16]}"
    temporary = Path(tempfile.gettempdir()).absolute() / name
    return temporary if len(os.fsencode(temporary)) <= _LONGEST_SOCKET_FOLDER else Path("/tmp") / name  # noqa: S108 - made 0700 and checked


def make_socket_folder(folder: Path, identity: Identity) -> None:
    """Make the folder that nobody else may enter; it is what keeps others out, since the socket asks no password."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found, above = folder.lstat(), folder.parent.stat()
    nobody_else_made_it = above.st_uid == os.geteuid() and not above.st_mode & 0o022
    known = nobody_else_made_it or found.st_uid in {os.geteuid(), identity.owner_uid}
    if not stat.S_ISDIR(found.st_mode) or not known:
        raise InitialisationError(f"{folder} is not ours: remove it, or choose another ROOMS_DATA")
    os.chown(folder, identity.owner_uid, identity.owner_gid)
    folder.chmod(0o700)


def make(folder: Path, binaries: Binaries, identity: Identity) -> None:
    """Make the data folder when it is new, hand it to the identity, and write the settings.

    Raises InitialisationError when initdb fails or the folder is of another major version.
    """
    version = folder / "PG_VERSION"
    if not version.exists():
        _initialise(folder, binaries, identity)
    if (found := version.read_text().strip()) != str(MAJOR):
        raise InitialisationError(
            f"{folder} was written by PostgreSQL {found}, this is {MAJOR}: upgrade it with pg_upgrade, or choose another ROOMS_DATA"
        )
    if folder.stat().st_uid != identity.owner_uid:
        _hand_over(folder, identity)
    chosen = tuning.settings(binaries, tuning.memory_bytes())
    include = folder / _INCLUDE
    include.write_text(tuning.rendered(chosen))
    os.chown(include, identity.owner_uid, identity.owner_gid)


def clear(folder: Path, sockets: Path) -> None:
    """End what an earlier run left of PostgreSQL on this folder, and remove the files that would stop the next one."""
    postmaster = _postmaster(folder)
    left = set(processes.working_in(folder.resolve(), "postgres"))
    if postmaster is not None and postmaster not in left and _is_ours(postmaster, folder):
        left.add(postmaster)
    if postmaster in left:
        processes.end(postmaster, (signal.SIGINT, 10.0), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0))
        left = set(processes.working_in(folder.resolve(), "postgres"))
    for backend in left:
        processes.end(backend, (signal.SIGKILL, 5.0))
    # Its number may by now be that of another process, or of its own zombie: PostgreSQL would take either for a living server.
    if postmaster is not None and processes.taken(postmaster):
        (folder / "postmaster.pid").unlink(missing_ok=True)
    for name in (f".s.PGSQL.{PORT}", f".s.PGSQL.{PORT}.lock"):
        (sockets / name).unlink(missing_ok=True)


def _initialise(folder: Path, binaries: Binaries, identity: Identity) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise InitialisationError(f"{folder} is no data folder of PostgreSQL, and not empty: choose another ROOMS_DATA")
    partial = folder.with_name(f"{folder.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(mode=0o700)
    os.chown(partial, identity.owner_uid, identity.owner_gid)
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
        launched(initdb, identity=identity, death=signal.SIGKILL),
        check=False,
        capture_output=True,
        text=True,
        cwd="/",
        env=ENVIRONMENT,
        timeout=_INITDB_TIMEOUT_S,
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise InitialisationError(f"PostgreSQL could not make its data folder {folder}:\n{said}")
    with (partial / "postgresql.conf").open("a") as file:
        file.write(f"\ninclude_if_exists = '{_INCLUDE}'\n")
    if folder.exists():
        folder.rmdir()
    # Only a folder that is whole gets the name: a start that was killed half-way begins anew.
    partial.rename(folder)


def _hand_over(folder: Path, identity: Identity) -> None:
    for root, _, files in os.walk(folder):
        for path in (root, *(os.path.join(root, file) for file in files)):  # noqa: PTH118 - a walk over many files
            os.chown(path, identity.owner_uid, identity.owner_gid, follow_symlinks=False)


def _postmaster(folder: Path) -> int | None:
    try:
        return int((folder / "postmaster.pid").read_text().splitlines()[0])
    except (OSError, ValueError, IndexError):
        return None


def _is_ours(pid: int, folder: Path) -> bool:
    # Where working folders cannot be seen, the command line names the data folder.
    argv = processes.command(pid)
    return bool(argv) and Path(argv[0]).name == "postgres" and str(folder) in argv
