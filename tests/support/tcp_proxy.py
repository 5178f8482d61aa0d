"""Run a TCP proxy in front of a real server that cuts, holds back and drops data."""

import asyncio
import contextlib
import ssl
from pathlib import Path
from typing import Final, Self

_PATIENCE_S: Final = 30.0
Target = tuple[str, int] | Path
"""Host and port, or the path of a unix socket."""


class Proxy:
    """Forward every byte until a fault is set. `address` is where to connect."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        path: Path | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`path`: a unix socket instead of host and port.

        `tls`: clients speak TLS to it; behind it all is plain.
        """
        self._target: Target = (host, port) if path is None else path
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers = asyncio.Event()
        self._answers.set()
        self.port = 0
        self.connections = 0
        """Return the number of connections made so far."""
        self.asked = 0
        """Bytes that clients sent so far."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._server is not None:
            self._server.close()
        self._answers.set()
        self.cut()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_PATIENCE_S)

    def cut(self) -> None:
        """Break every connection, on both sides, with what is under way."""
        for writer in self._writers:
            if writer.transport is not None:
                writer.transport.abort()

    def hold_answers(self) -> None:
        """From now on what the server says waits here; what clients say goes on."""
        self._answers.clear()

    def let_answers_go(self) -> None:
        """End of `hold_answers`."""
        self._answers.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            target = self._target
            their_reader, their_writer = await (
                asyncio.open_unix_connection(target)
                if isinstance(target, Path)
                else asyncio.open_connection(*target)
            )
        except OSError:
            writer.transport.abort()
            self._tasks.discard(task)
            return
        self._writers |= {writer, their_writer}
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass(reader, their_writer, answers=False))
                tasks.create_task(self._pass(their_reader, writer, answers=True))
        except* OSError:
            pass
        finally:
            for each in (writer, their_writer):
                self._writers.discard(each)
                each.close()
            self._tasks.discard(task)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                if answers:
                    await self._answers.wait()
                else:
                    self.asked += len(data)
                writer.write(data)
                await writer.drain()
        writer.close()
