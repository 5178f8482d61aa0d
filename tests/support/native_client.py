"""A client that knows nothing of Rooms: plain stomp.py, with a user and a queue."""

import queue
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from stomp import ConnectionListener, StompConnection11, StompConnection12
from stomp.exception import ConnectFailedException, NotConnectedException
from stomp.utils import Frame

from rooms.backend_urls import parse_stomp_url
from tests.support.polling import PATIENCE_S, until

_ANYTHING_ELSE_S: Final = 0.3


class RefusedError(Exception):
    """The broker does not know the user, or not with this password."""


class Reader(ConnectionListener):  # type: ignore[misc]
    """One connection.

    It reads `queue` by default; refusals are in `errors`.
    """

    def __init__(
        self,
        url: str,
        user: str,
        password: str,
        *,
        authority: Path | None = None,
        version: type[StompConnection11] = StompConnection12,
    ) -> None:
        """`authority`: by TLS, from a broker whose certificate it signed."""
        self.came: queue.Queue[Frame] = queue.Queue()
        self.receipts: queue.Queue[str] = queue.Queue()
        self.errors: queue.Queue[str] = queue.Queue()
        self.over = False
        self.connection = version(
            list(parse_stomp_url(url).hosts), reconnect_attempts_max=1, auto_decode=False
        )
        if authority is not None:
            self.connection.set_ssl(parse_stomp_url(url).hosts, ca_certs=str(authority))
        self.connection.set_listener("", self)
        try:
            self.connection.connect(user, password, wait=True)
        except ConnectFailedException as exc:
            raise RefusedError(self.errors.get(timeout=PATIENCE_S)) from exc

    def on_message(self, frame: Frame) -> None:
        self.came.put(frame)

    def on_error(self, frame: Frame) -> None:
        self.errors.put(f"{frame.headers.get('message')} {frame.body}")

    def on_receipt(self, frame: Frame) -> None:
        self.receipts.put(frame.headers["receipt-id"])

    def on_disconnected(self) -> None:
        self.over = True

    def read(
        self, destination: str, routing: str = "MULTICAST", *, ack: str = "client-individual"
    ) -> None:
        """Take what comes; each message is acknowledged by `next`."""
        self.connection.subscribe(
            destination, id="1", ack=ack, headers={"subscription-type": routing}
        )

    def receipt(self, name: str) -> None:
        """Wait for the next receipt, which must have this name."""
        assert self.receipts.get(timeout=PATIENCE_S) == name

    def send(self, destination: str, routing: str = "MULTICAST") -> None:
        headers = {
            "destination-type": routing,
            "persistent": "true",
            "receipt": secrets.token_hex(4),
        }
        self.connection.send(destination, "{}", headers=headers)

    def next(self) -> Frame:
        """The next message, acknowledged."""
        frame = self.came.get(timeout=PATIENCE_S)
        self.connection.ack(frame.headers["ack"])
        return frame

    def nothing_more(self) -> bool:
        """Return whether no message arrives for a moment."""
        try:
            self.came.get(timeout=_ANYTHING_ELSE_S)
        except queue.Empty:
            return True
        return False

    def refused(self) -> str:
        """Return the broker's message at the end of the connection."""
        said = self.errors.get(timeout=PATIENCE_S)
        until(lambda: self.over, "the connection to end")
        return said


@contextmanager
def reader(
    url: str,
    user: str,
    password: str,
    *,
    authority: Path | None = None,
    version: type[StompConnection11] = StompConnection12,
) -> Iterator[Reader]:
    """Closed in the end. RefusedError: it did not come in."""
    found = Reader(url, user, password, authority=authority, version=version)
    try:
        yield found
    finally:
        with suppress(NotConnectedException):
            found.connection.disconnect()
