"""A PostgreSQL that recovers: it refuses every session as a server does then, until it is let go on; then the real one answers."""

import asyncio
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy.engine import make_url

from tests.support.polling import PATIENCE_S

STARTING: Final = "the database system is starting up"
_SSL: Final = (80877103, 80877104)
"""Requests for TLS, or for GSSAPI, before the session's own first message."""
_CHUNK: Final = 65_536


@dataclass
class Recovering:
    """`url`: where it is; `refused`: how many sessions it has refused; `over`: from then on the real server answers."""

    url: str
    refused: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def crash(self) -> None:
        """End every session at once, and recover again."""
        self.over.clear()
        self._loop.call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


def _refusal() -> bytes:
    fields = b"".join(
        kind + text.encode() + b"\0"
        for kind, text in ((b"S", "FATAL"), (b"V", "FATAL"), (b"C", "57P03"), (b"M", STARTING))
    )
    return b"E" + struct.pack("!i", len(fields) + 5) + fields + b"\0"


async def _first_message(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    while True:
        head = await reader.readexactly(8)
        length, code = struct.unpack("!ii", head)
        if code not in _SSL:
            return head + await reader.readexactly(length - len(head))
        writer.write(b"N")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _serve(
    found: Recovering, real: str, ready: threading.Event, stop: "list[asyncio.Event]"
) -> None:
    url = make_url(real)
    folder = dict(url.query).get("host")

    tasks: set[asyncio.Task[None]] = set()

    async def session(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        both = [writer]
        found._writers.add(writer)
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                first = await _first_message(reader, writer)
                if not found.over.is_set():
                    found.refused += 1
                    writer.write(_refusal())
                    await writer.drain()
                    return
                if isinstance(folder, str):
                    there = await asyncio.open_unix_connection(f"{folder}/.s.PGSQL.5432")
                else:
                    there = await asyncio.open_connection(url.host, url.port or 5432)
                both.append(there[1])
                found._writers.add(there[1])
                there[1].write(first)
                await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))
        finally:
            found._writers -= set(both)
            for each in both:
                each.close()
            for each in both:
                with suppress(OSError):
                    await each.wait_closed()
            tasks.discard(task)

    server = await asyncio.start_server(session, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    plain = url.set(host="127.0.0.1", port=port, query={"sslmode": "disable"})
    found.url = plain.render_as_string(hide_password=False)
    stop.append(asyncio.Event())
    ready.set()
    await stop[0].wait()
    server.close()
    found._abort()
    if tasks:
        await asyncio.wait(tasks, timeout=PATIENCE_S)


@contextmanager
def recovering(real: str) -> Iterator[Recovering]:
    """A server of this kind in front of the one at `real`, on a thread of its own."""
    found, ready, stop = Recovering(url=""), threading.Event(), list[asyncio.Event]()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: found._loop) as runner:
            runner.run(_serve(found, real, ready, stop))

    thread = threading.Thread(target=run, name="recovering")
    thread.start()
    try:
        assert ready.wait(PATIENCE_S), "the server did not start"
        yield found
    finally:
        found._loop.call_soon_threadsafe(stop[0].set)
        thread.join(PATIENCE_S)
