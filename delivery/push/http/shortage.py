"""Distinguish a shortage of this process or machine from a failure of the endpoint.

No attempt was made then: it must not count against the endpoint.
"""

import errno
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from delivery.push.errors import ResourceShortageError
from rooms.outages import OUTAGES, Dependency

_PUT_OFF: Final = "webhooks were put off"
_REMEDIES: Final = {
    errno.EMFILE: "raise the limit of open files (ulimit -Hn)",
    errno.ENFILE: "raise the machine's limit of open files (fs.file-max)",
    errno.ENOBUFS: "this machine needs more memory for its network",
    errno.ENOMEM: "this machine needs more memory",
}
_NO_PORT: Final = "widen net.ipv4.ip_local_port_range"


class ShortageReporter:
    """Log shortages, once for an outage, and pass each one on."""

    def __init__(self, on_shortage: Callable[[str], None]) -> None:
        """Configure the reporter. `on_shortage` gets the error's name, such as EMFILE."""
        self._on_shortage = on_shortage

    def check(self, error: OSError, address: str, port: int) -> None:
        """Raise ResourceShortageError if an error of a dial is no failure of the endpoint."""
        remedy = _REMEDIES.get(error.errno or 0)
        if error.errno == errno.EADDRNOTAVAIL and _has_route(address, port):
            remedy = _NO_PORT
        if remedy is not None:
            raise self._report(error, remedy) from error

    def of_lookup(self, error: OSError) -> ResourceShortageError:
        """Report what `find_lookup_shortage` returned; return the error to raise."""
        return self._report(error, _REMEDIES[error.errno or 0])

    def end(self) -> None:
        """Record that a connection was opened."""
        OUTAGES.record_success(_PUT_OFF, dependency=Dependency.CONNECTIONS)

    def _report(self, error: OSError, remedy: str) -> ResourceShortageError:
        shortage = ResourceShortageError(f"{error.strerror or error}: {remedy}")
        OUTAGES.record_failure(shortage, _PUT_OFF, dependency=Dependency.CONNECTIONS)
        self._on_shortage(errno.errorcode[error.errno or 0])
        return shortage


def find_lookup_shortage(error: Exception | None = None) -> OSError | None:
    """Return the system's error if a look-up that has just failed lacked a file or memory.

    The look-up's own `error` does not always have it: c-ares and libc replace it with theirs.
    """
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        return error
    try:
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
    except OSError as exc:
        if exc.errno in _REMEDIES:
            return exc
    return None


def _has_route(address: str, port: int) -> bool:
    """Return whether the machine has an address to connect from: else it lacks a free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return True
    return False
