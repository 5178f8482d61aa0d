"""Become another program, with another user if asked: `exec_as.py ORDERS PROGRAM [ARGUMENT ...]`.

Runs as a script in isolated mode, between fork and exec. Code that runs there inside a process with
threads may deadlock. ORDERS is a JSON object; all fields are optional:

    parent     process id that must still be the parent; exit otherwise
    death      signal to receive when the parent dies (Linux only)
    namespace  [uid, gid] to appear as, in a user namespace; the kernel still sees the real user
    account    [uid, gid] to become for good
    override   with `account`: keep the capability that opens folders of other users
    reach      folder that the program must be able to enter

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

EXIT_REFUSED = 70
EXIT_NOT_ENTERABLE = 71
EXIT_NO_PROGRAM = 127


def call_libc(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raise OSError if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def prctl(option: int, *arguments: int) -> None:
    padded = [*arguments, 0, 0, 0, 0][:4]
    call_libc("prctl", ctypes.c_int(option), *(ctypes.c_ulong(argument) for argument in padded))


def write_file(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def enter_namespace(uid: int, gid: int) -> None:
    outer_uid, outer_gid = os.geteuid(), os.getegid()
    call_libc("unshare", ctypes.c_int(CLONE_NEWUSER))
    write_file("/proc/self/setgroups", "deny")
    write_file("/proc/self/uid_map", f"{uid} {outer_uid} 1")
    write_file("/proc/self/gid_map", f"{gid} {outer_gid} 1")


def switch_user(uid: int, gid: int, *, override: bool) -> None:
    if override:
        # PostgreSQL checks its binaries by access(2), which ignores the capability without this.
        prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP)
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    if override:
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        kept = 1 << CAP_DAC_OVERRIDE
        call_libc("capset", header, (ctypes.c_uint32 * 6)(kept, kept, kept, 0, 0, 0))
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE)


def main() -> int:
    # A stop signal must end this process at once: Python's handler would be lost at exec.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    orders, command = json.loads(sys.argv[1]), sys.argv[2:]
    try:
        if "namespace" in orders:
            enter_namespace(*orders["namespace"])
        if "account" in orders:
            switch_user(*orders["account"], override=orders.get("override", False))
        # After the change of user, which would reset it.
        if "death" in orders and sys.platform == "linux":
            prctl(PR_SET_PDEATHSIG, orders["death"])
    except (OSError, AttributeError) as refused:
        sys.stderr.write(f"{command[0]}: {refused}\n")
        return EXIT_REFUSED
    if "parent" in orders and os.getppid() != orders["parent"]:
        return EXIT_REFUSED
    if "reach" in orders and not os.access(orders["reach"], os.X_OK):
        return EXIT_NOT_ENTERABLE
    # Python ignores these two signals, and exec would pass that on.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execv(command[0], command)  # noqa: S606 - the purpose of this script
    except OSError as missing:
        sys.stderr.write(f"{command[0]}: {missing.strerror}\n")
        return EXIT_NO_PROGRAM


if __name__ == "__main__":
    sys.exit(main())
