"""As whom PostgreSQL runs, since it refuses root and wants a user that has a name.

1. As ourselves, where we are an ordinary user.
2. In a user namespace: PostgreSQL sees an ordinary user, the kernel still sees us, so that a 0700 folder of root opens.
3. As a system account of its own, which then owns the data; where folders of root are in the way, with the one
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

from rooms.embedded.errors import IdentityError

ACCOUNT = "rooms-postgres"
_LAUNCHER = Path(__file__).with_name("launch.py")
_PROBE_TIMEOUT_S = 10


class Way(StrEnum):
    """How the user is changed."""

    OURSELVES = "ourselves"
    NAMESPACE = "namespace"
    ACCOUNT = "account"
    ACCOUNT_OVERRIDE = "account_override"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whom PostgreSQL takes itself for (uid, gid), and whom the kernel takes as owner of its files."""

    way: Way
    uid: int
    gid: int
    owner_uid: int
    owner_gid: int

    def orders(self) -> dict[str, object]:
        """What `launch.py` must do to get there."""
        match self.way:
            case Way.OURSELVES:
                return {}
            case Way.NAMESPACE:
                return {"namespace": [self.uid, self.gid]}
            case Way.ACCOUNT:
                return {"account": [self.uid, self.gid]}
            case Way.ACCOUNT_OVERRIDE:
                return {"account": [self.uid, self.gid], "override": True}
            case _:
                assert_never(self.way)


def launched(
    argv: Sequence[str], *, identity: Identity | None = None, death: Signals | None = None, reach: Path | None = None
) -> list[str]:
    """The command that runs `argv` under an identity, tied to the life of the calling process where `death` is given."""
    orders = {} if identity is None else identity.orders()
    if death is not None:
        orders |= {"parent": os.getpid(), "death": int(death)}
    if reach is not None:
        orders["reach"] = str(reach)
    return [sys.executable, "-I", "-S", str(_LAUNCHER), json.dumps(orders), *argv]


def choose(data: Path, postgres: Path) -> Identity:
    """The first way that works for this data folder and this program.

    Raises IdentityError with what to do when none does.
    """
    if os.geteuid() != 0 and _named(os.geteuid()):
        return ourselves()
    for candidate in _candidates():
        if candidate.way is Way.ACCOUNT:
            # Others may pass through our own folder, not list it; what lies in it has its own modes.
            data.chmod(data.stat().st_mode | 0o001)
        if works(candidate, data, postgres):
            return candidate
    raise IdentityError(_refusal(data))


def works(identity: Identity, data: Path, postgres: Path) -> bool:
    """Whether the program starts under this identity and could enter the folder."""
    try:
        answer = subprocess.run(
            launched([str(postgres), "--version"], identity=identity, reach=data),
            check=False,
            capture_output=True,
            cwd="/",
            timeout=_PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return False
    return answer.returncode == 0


def ourselves() -> Identity:
    uid, gid = os.geteuid(), os.getegid()
    return Identity(way=Way.OURSELVES, uid=uid, gid=gid, owner_uid=uid, owner_gid=gid)


def namespaced() -> Identity | None:
    """An ordinary user that exists by name, worn over our own; None where no such user exists."""
    ordinary = next((entry for entry in pwd.getpwall() if entry.pw_uid not in {0, os.geteuid()}), None)
    if ordinary is None or sys.platform != "linux":
        return None
    return Identity(
        way=Way.NAMESPACE,
        uid=ordinary.pw_uid,
        gid=ordinary.pw_gid,
        owner_uid=os.geteuid(),
        owner_gid=os.getegid(),
    )


def account(*, override: bool) -> Identity | None:
    """PostgreSQL's own system account, made when missing; None where that is not possible."""
    entry = _entry(ACCOUNT)
    if entry is None and (useradd := shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin:/bin")):
        made = [useradd, "--system", "--no-create-home", "--home-dir", "/", "--shell", "/bin/false", ACCOUNT]
        subprocess.run(made, check=False, capture_output=True, timeout=_PROBE_TIMEOUT_S)
        entry = _entry(ACCOUNT)
    if entry is None:
        return None
    way = Way.ACCOUNT_OVERRIDE if override else Way.ACCOUNT
    uid, gid = entry.pw_uid, entry.pw_gid
    return Identity(way=way, uid=uid, gid=gid, owner_uid=uid, owner_gid=gid)


def _candidates() -> Iterator[Identity]:
    if worn := namespaced():
        yield worn
    if os.geteuid() == 0:
        for override in (False, True) if sys.platform == "linux" else (False,):
            if own := account(override=override):
                yield own


def _entry(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def _named(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _refusal(data: Path) -> str:
    if os.geteuid() != 0:
        return (
            f"PostgreSQL wants a user with a name, and user {os.geteuid()} has none in /etc/passwd: add it there, "
            "run as another user, or set DATABASE_URL"
        )
    return (
        "PostgreSQL refuses to run as root, and neither a user namespace nor a system account could be used. "
        f"Run as an ordinary user, make {data} and the installation enterable for the account {ACCOUNT}, or set DATABASE_URL"
    )
