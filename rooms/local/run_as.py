"""Choose the user that PostgreSQL runs as, since it refuses root and a user without a name.

1. The current user, if it is an ordinary user.
2. A user namespace: PostgreSQL sees an ordinary user, the kernel the current one. Opens 0700
   folders of root.
3. A system account, which then owns the data. If folders of root are in the way, it keeps the
   capability that opens them.
"""

import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from signal import Signals
from typing import assert_never

from rooms.local.errors import IdentityError

SYSTEM_ACCOUNT = "rooms-postgres"
_LAUNCHER = Path(__file__).with_name("exec_as.py")
_PROBE_TIMEOUT_S = 10


class RunAsMethod(StrEnum):
    """Name a way to change the user."""

    CURRENT_USER = "ourselves"
    NAMESPACE = "namespace"
    ACCOUNT = "account"
    ACCOUNT_OVERRIDE = "account_override"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAs:
    """Hold the user that PostgreSQL runs as.

    PostgreSQL sees `uid` and `gid`. Its files belong to `owner_uid` and `owner_gid`.
    """

    method: RunAsMethod
    uid: int
    gid: int
    owner_uid: int
    owner_gid: int

    def launch_options(self) -> dict[str, object]:
        """Return the orders for `exec_as.py`."""
        match self.method:
            case RunAsMethod.CURRENT_USER:
                return {}
            case RunAsMethod.NAMESPACE:
                return {"namespace": [self.uid, self.gid]}
            case RunAsMethod.ACCOUNT:
                return {"account": [self.uid, self.gid]}
            case RunAsMethod.ACCOUNT_OVERRIDE:
                return {"account": [self.uid, self.gid], "override": True}
            case _:
                assert_never(self.method)


def launch_command(
    argv: Sequence[str],
    *,
    run_as: RunAs | None = None,
    parent_death_signal: Signals | None = None,
    must_enter: Path | None = None,
) -> list[str]:
    """Return the command that runs `argv` as this user.

    With `parent_death_signal`, the program receives that signal when the calling process dies. With
    `must_enter`, it runs only if it can enter that folder.
    """
    orders = {} if run_as is None else run_as.launch_options()
    if parent_death_signal is not None:
        orders |= {"parent": os.getpid(), "death": int(parent_death_signal)}
    if must_enter is not None:
        orders["reach"] = str(must_enter)
    return [sys.executable, "-I", "-S", str(_LAUNCHER), json.dumps(orders), *argv]


def choose_run_as(data: Path, postgres: Path) -> RunAs:
    """Return the first way that works for this data folder and this program.

    Raises IdentityError with advice if none does.
    """
    if os.geteuid() != 0 and _has_name(os.geteuid()):
        return as_current_user()
    for candidate in _candidates():
        if candidate.method is RunAsMethod.ACCOUNT:
            # Others may enter the folder, not list it; its contents have modes of their own.
            data.chmod(data.stat().st_mode | 0o001)
        if can_run(candidate, data, postgres):
            return candidate
    raise IdentityError(_refusal_message(data))


def can_run(run_as: RunAs, data: Path, postgres: Path) -> bool:
    """Return True if the program starts as this user and can enter the folder."""
    try:
        answer = subprocess.run(
            launch_command([str(postgres), "--version"], run_as=run_as, must_enter=data),
            check=False,
            capture_output=True,
            cwd="/",
            timeout=_PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return False
    return answer.returncode == 0


def as_current_user() -> RunAs:
    """Return the current user."""
    uid, gid = os.geteuid(), os.getegid()
    return RunAs(method=RunAsMethod.CURRENT_USER, uid=uid, gid=gid, owner_uid=uid, owner_gid=gid)


def as_namespace_user() -> RunAs | None:
    """Return an ordinary user to appear as in a user namespace, or None if there is none."""
    ordinary = next(
        (entry for entry in pwd.getpwall() if entry.pw_uid not in {0, os.geteuid()}), None
    )
    if ordinary is None or sys.platform != "linux":
        return None
    return RunAs(
        method=RunAsMethod.NAMESPACE,
        uid=ordinary.pw_uid,
        gid=ordinary.pw_gid,
        owner_uid=os.geteuid(),
        owner_gid=os.getegid(),
    )


def as_system_account(*, override: bool) -> RunAs | None:
    """Return PostgreSQL's own system account, created if missing, or None if that fails."""
    entry = _passwd_entry(SYSTEM_ACCOUNT)
    if entry is None and (useradd := shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin:/bin")):
        made = [
            useradd,
            "--system",
            "--no-create-home",
            "--home-dir",
            "/",
            "--shell",
            "/bin/false",
            SYSTEM_ACCOUNT,
        ]
        subprocess.run(made, check=False, capture_output=True, timeout=_PROBE_TIMEOUT_S)
        entry = _passwd_entry(SYSTEM_ACCOUNT)
    if entry is None:
        return None
    method = RunAsMethod.ACCOUNT_OVERRIDE if override else RunAsMethod.ACCOUNT
    uid, gid = entry.pw_uid, entry.pw_gid
    return RunAs(method=method, uid=uid, gid=gid, owner_uid=uid, owner_gid=gid)


def _candidates() -> Iterator[RunAs]:
    if namespace_user := as_namespace_user():
        yield namespace_user
    if os.geteuid() == 0:
        for override in (False, True) if sys.platform == "linux" else (False,):
            if own := as_system_account(override=override):
                yield own


def _passwd_entry(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def _has_name(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _refusal_message(data: Path) -> str:
    if os.geteuid() != 0:
        return (
            f"PostgreSQL needs a user with a name, and user {os.geteuid()} has none in "
            "/etc/passwd: add it there, run as another user, or set DATABASE_URL"
        )
    return (
        "PostgreSQL refuses to run as root, and neither a user namespace nor a system account "
        f"works. Run as an ordinary user, let the account {SYSTEM_ACCOUNT} enter {data} and the "
        "installation, or set DATABASE_URL"
    )
