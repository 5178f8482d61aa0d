"""Use what is private to kazoo: the one module that says what is assumed of it.

kazoo exposes neither the session timeout that the server granted, nor when it pings. `ASSUMED`
lists the names. The unit test `test_kazoo_internals.py` names each that a new version lacks.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

ASSUMED: Final[Mapping[str, frozenset[str]]] = {
    "kazoo.client.KazooClient": frozenset(["_connection"]),
    "kazoo.protocol.connection.ConnectionHandler": frozenset(["_connect", "_send_ping"]),
}
_GRANTED_PER_READ: Final = 1.5
"""kazoo waits for an answer for two thirds of the timeout that was granted."""


def report_timeout(client: Any, report: Callable[[float], None]) -> None:
    """Call `report`, on kazoo's thread, with each session timeout that a server grants, in seconds.

    kazoo's step to connect returns how long it waits for an answer, in milliseconds.
    """
    connection = client._connection  # noqa: SLF001 - see above
    connect = connection._connect  # noqa: SLF001 - see above

    def connect_and_report(*arguments: Any) -> Any:
        read_ms, connect_ms = connect(*arguments)
        report(read_ms * _GRANTED_PER_READ / 1000)
        return read_ms, connect_ms

    connection._connect = connect_and_report  # noqa: SLF001 - see above


def ping_only_when(client: Any, wanted: Callable[[], bool]) -> None:
    """Let kazoo's thread ping the server only when `wanted`, which it asks before each ping."""
    connection = client._connection  # noqa: SLF001 - see above
    ping = connection._send_ping  # noqa: SLF001 - see above

    def ping_if_wanted(*arguments: Any) -> None:
        if wanted():
            ping(*arguments)

    connection._send_ping = ping_if_wanted  # noqa: SLF001 - see above
