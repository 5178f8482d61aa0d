"""STOMP by hand, a frame at a time: what a broker says, without any of our adapter between."""

import json
import socket
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

_READ_BYTES: Final = 64 * 1024


class Talk:
    """A few frames of STOMP, by hand."""

    def __init__(self, url: str, *, password: str | None = None, version: str = "1.2") -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port), timeout=30)
        self._received = bytearray()
        self._searched = 0
        self.greeting = self.ask(
            "CONNECT",
            {
                "accept-version": version,
                "login": parts.username,
                "passcode": password or parts.password,
            },
        )

    def ask(self, command: str, headers: Mapping[str, str | None], body: str = "") -> str:
        """Send a frame, and give the next one that comes back."""
        self.tell((command, headers), body=body)
        return self.next()

    def tell(self, *frames: tuple[str, Mapping[str, str | None]], body: str = "") -> None:
        """Send frames in one packet, each with this body."""
        packet = ""
        for command, headers in frames:
            lines = [command, *(f"{name}:{value}" for name, value in headers.items())]
            packet += "\n".join(lines) + f"\n\n{body}\0"
        self._socket.sendall(packet.encode())

    def next(self) -> str:
        """Return the next frame, or an empty string at the end of the connection."""
        while (end := self._received.find(b"\0", self._searched)) < 0:
            self._searched = len(self._received)
            if not (part := self._socket.recv(_READ_BYTES)):
                return self._take(len(self._received)).lstrip("\n")
            self._received += part
        return self._take(end + 1).lstrip("\n").rstrip("\0")

    def _take(self, size: int) -> str:
        taken = self._received[:size].decode()
        del self._received[:size]
        self._searched = 0
        return taken

    def close(self) -> None:
        self._socket.close()


def make_queue(talk: Talk, name: str, address: str, *, selector: str | None = None) -> None:
    """Make a queue by the broker's management, which has carried it out when it gives the receipt."""
    queue = {
        "name": name,
        "address": address,
        "routing-type": "ANYCAST",
        "auto-create-address": True,
        **({} if selector is None else {"filter-string": selector}),
    }
    _manage(talk, "createQueue", json.dumps(queue))


def destroy_queue(talk: Talk, name: str) -> None:
    """Destroy a queue, if there is one, and what is in it."""
    _manage(talk, "destroyQueue", name, True, True)


def _manage(talk: Talk, operation: str, *arguments: object) -> None:
    order = {
        "destination": "activemq.management",
        "destination-type": "ANYCAST",
        "_AMQ_ResourceName": "broker",
        "_AMQ_OperationName": operation,
        "receipt": "done",
    }
    assert talk.ask("SEND", order, json.dumps(arguments)).startswith("RECEIPT")
