"""A name server on loopback that answers as a test says, or stays silent."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, cast

SILENT: Final = None
_A, _AAAA = 1, 28
_HEADER: Final = struct.Struct("!HHHHHH")
_RECORD: Final = struct.Struct("!HHIH")
_SAME_NAME: Final = b"\xc0\x0c"
NAME_ERROR: Final = 3
SERVER_FAILURE: Final = 2

Behaviour = Callable[[str], Sequence[str] | int | None]
"""The addresses of a name, a response code, or SILENT."""


@dataclass(frozen=True, slots=True)
class Query:
    """Hold what an answer repeats: the id, the question as bytes, and its name and type."""

    id: int
    question: bytes
    name: str
    type: int


def parse_query(data: bytes) -> Query:
    """Return the query in a packet of the resolver, which is well-formed."""
    place, labels = _HEADER.size, list[str]()
    while (length := data[place]) > 0:
        labels.append(data[place + 1 : place + 1 + length].decode())
        place += 1 + length
    (kind,) = struct.unpack_from("!H", data, place + 1)
    question = data[_HEADER.size : place + 5]
    return Query(int.from_bytes(data[:2], "big"), question, ".".join(labels).lower(), kind)


class NameServer(asyncio.DatagramProtocol):
    """Answer A and AAAA queries; `asked` has the names, once a query."""

    def __init__(self, behave: Behaviour, *, ttl_s: int = 3600) -> None:
        self.behave = behave
        self.ttl_s = ttl_s
        self.asked: list[str] = []
        self.came = asyncio.Event()
        self.address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note where it listens."""
        self._transport = cast("asyncio.DatagramTransport", transport)
        host, port = transport.get_extra_info("sockname")
        self.address = f"{host}:{port}"

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Answer."""
        query = parse_query(data)
        name = query.name
        self.asked.append(name)
        self.came.set()
        answer = self.behave(name)
        if answer is SILENT:
            return
        code, addresses = (answer, ()) if isinstance(answer, int) else (0, answer)
        records = [packed for text in addresses if (packed := self._record(query.type, text))]
        flags = 0x8180 | code
        header = _HEADER.pack(query.id, flags, 1, len(records), 0, 0)
        self._transport.sendto(header + query.question + b"".join(records), addr)

    def _record(self, kind: int, text: str) -> bytes:
        family = socket.AF_INET6 if ":" in text else socket.AF_INET
        if kind != (_AAAA if family is socket.AF_INET6 else _A):
            return b""
        packed = socket.inet_pton(family, text)
        return _SAME_NAME + _RECORD.pack(kind, 1, self.ttl_s, len(packed)) + packed


@asynccontextmanager
async def naming(behave: Behaviour) -> AsyncIterator[NameServer]:
    """Run a name server on a free port of 127.0.0.1."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(
        lambda: NameServer(behave), local_addr=("127.0.0.1", 0)
    )
    try:
        yield server
    finally:
        transport.close()
