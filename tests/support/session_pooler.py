"""Stand for PgBouncer in session mode: refuse startup parameters that it would not know."""

import asyncio
import struct
from pathlib import Path
from typing import Final, Self

from rooms.postgres_urls import format_postgres_url, parse_postgres_url

_KNOWN: Final = frozenset(
    {"user", "database", "application_name", "client_encoding", "DateStyle", "TimeZone"}
)
_ENCRYPTION_REQUESTS: Final = frozenset({80877103, 80877104})
_CANCEL_REQUEST: Final = 80877102


class SessionPooler:
    """Forward sessions to the server of a URL; an async context manager."""

    def __init__(self, url: str) -> None:
        self._parameters = parse_postgres_url(url)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self.refused: list[str] = []
        """The startup parameters for which a session was refused."""
        self.sessions = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks)

    @property
    def url(self) -> str:
        """Return the address of the same database through the pooler."""
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        own = {"host": "127.0.0.1", "port": str(port), "sslmode": "disable"}
        return format_postgres_url(self._parameters | own)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.append(writer)
        try:
            await self._forward(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            (size,) = struct.unpack("!I", await reader.readexactly(4))
            body = await reader.readexactly(size - 4)
            (code,) = struct.unpack("!I", body[:4])
            if code not in _ENCRYPTION_REQUESTS:
                break
            writer.write(b"N")
        if code != _CANCEL_REQUEST:
            words = body[4:].split(b"\0")
            names = [word.decode() for word in words[0::2] if word]
            if unknown := [name for name in names if name not in _KNOWN]:
                self.refused += unknown
                text = f"unsupported startup parameter: {unknown[0]}".encode()
                answer = b"SFATAL\0C08P01\0M" + text + b"\0\0"
                writer.write(b"E" + struct.pack("!I", len(answer) + 4) + answer)
                await writer.drain()
                return
            self.sessions += 1
        socket = Path(self._parameters["host"], f".s.PGSQL.{self._parameters.get('port', '5432')}")
        there, back = await asyncio.open_unix_connection(socket)
        try:
            self._writers.append(back)
            back.write(struct.pack("!I", size) + body)
            await asyncio.gather(_copy(reader, back), _copy(there, writer))
        finally:
            back.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.close()
