"""Becomes another program: run as a script, in isolated mode, with its orders as JSON and the program's own arguments.

A script between fork and exec, because code run there inside a process that has threads may deadlock.
Orders, all optional:
    parent     process id that must still be our parent, otherwise we leave
    death      signal to get when the parent dies (Linux only)
    namespace  [uid, gid] to appear as, in a user namespace of one user; the kernel goes on treating us as who we were
    account    [uid, gid] to become for good
    override   with `account`: keep the one capability that opens folders of others
    reach      folder that must be enterable in the end
Exit codes: 70 a right was refused, 71 `reach` cannot be entered, 127 no such program.
"""

import ctypes
import json
import os
import signal
import sys

CLONE_NEWUSER = 0x10000000
PR_SET_PDEATHSIG = 1
PR_SET_SECUREBITS = 28
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
SECBIT_NO_SETUID_FIXUP = 1 << 2
CAP_DAC_OVERRIDE = 1
CAPABILITY_VERSION_3 = 0x20080522

REFUSED = 70
OUT_OF_REACH = 71
NO_PROGRAM = 127


def call(name: str, *arguments: object) -> None:
    """A call of the C library; OSError where it says no."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def prctl(option: int, *arguments: int) -> None:
    padded = [*arguments, 0, 0, 0, 0][:4]
    call("prctl", ctypes.c_int(option), *(ctypes.c_ulong(argument) for argument in padded))


def write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def enter_namespace(uid: int, gid: int) -> None:
    outer_uid, outer_gid = os.geteuid(), os.getegid()
    call("unshare", ctypes.c_int(CLONE_NEWUSER))
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{uid} {outer_uid} 1")
    write("/proc/self/gid_map", f"{gid} {outer_gid} 1")


def become(uid: int, gid: int, *, override: bool) -> None:
    if override:
        # Without this bit access(2), which PostgreSQL asks about its own binaries, would ignore the capability.
        prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP)
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    if override:
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        kept = 1 << CAP_DAC_OVERRIDE
        call("capset", header, (ctypes.c_uint32 * 6)(kept, kept, kept, 0, 0, 0))
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE)


def main() -> int:
    # A signal to stop must end us now, not wait for Python and be lost at exec.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    orders, command = json.loads(sys.argv[1]), sys.argv[2:]
    try:
        if "namespace" in orders:
            enter_namespace(*orders["namespace"])
        if "account" in orders:
            become(*orders["account"], override=orders.get("override", False))
        # After the change of user, which would clear it.
        if "death" in orders and sys.platform == "linux":
            prctl(PR_SET_PDEATHSIG, orders["death"])
    except (OSError, AttributeError) as refused:
        sys.stderr.write(f"{command[0]}: {refused}\n")
        return REFUSED
    if "parent" in orders and os.getppid() != orders["parent"]:
        return REFUSED
    if "reach" in orders and not os.access(orders["reach"], os.X_OK):
        return OUT_OF_REACH
    # Python ignores these two for itself, and exec would hand that on.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execv(command[0], command)  # noqa: S606 - becoming the program is all that this script is for
    except OSError as missing:
        sys.stderr.write(f"{command[0]}: {missing.strerror}\n")
        return NO_PROGRAM


if __name__ == "__main__":
    sys.exit(main())
