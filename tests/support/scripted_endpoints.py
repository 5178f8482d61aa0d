"""Serve scripted endpoints on loopback, byte by byte."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
NO_CONTENT = b"HTTP/1.1 204 No Content\r\n\r\n"
BOUND_S = 90.0


class Stream:
    """One connection of an endpoint; `number` counts from 1."""

    def __init__(
        self,
        endpoint: "Endpoint",
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.endpoint = endpoint
        self.number = number
        self.reader = reader
        self.writer = writer

    async def request(self) -> bytes:
        """Read and record a request, and return its body. Raise IncompleteReadError at the end."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.partition(b":")[2])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length:")
        )
        body = await self.reader.readexactly(length)
        self.endpoint.requests.append((head, body))
        self.endpoint.came.set()
        return body

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def gone(self) -> None:
        """Wait until the peer closes."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass

    def reset(self) -> None:
        """Close with RST."""
        linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()


Script = Callable[[Stream], Awaitable[None]]


class Endpoint:
    """Requests and connections of an endpoint. `left` is released once for every ended connection."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[tuple[bytes, bytes]] = []
        self.connections = 0
        self.open = 0
        self.most_open = 0
        self.left = asyncio.Semaphore(0)
        self.came = asyncio.Event()

    async def until(self, *, requests: int = 0, connections: int = 0) -> None:
        """Wait for this number of requests and connections."""

        async def wait() -> None:
            while len(self.requests) < requests or self.connections < connections:
                self.came.clear()
                await self.came.wait()

        await asyncio.wait_for(wait(), BOUND_S)

    async def one_left(self) -> None:
        await asyncio.wait_for(self.left.acquire(), BOUND_S)


@contextlib.asynccontextmanager
async def serving(
    script: Script, *, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[Endpoint]:
    """Run `script` for every connection, and close the connection after it."""
    endpoint = Endpoint()
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        endpoint.connections += 1
        endpoint.came.set()
        endpoint.open += 1
        endpoint.most_open = max(endpoint.most_open, endpoint.open)
        try:
            await script(Stream(endpoint, endpoint.connections, reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            endpoint.open -= 1
            endpoint.left.release()
            # Written data is still sent, without waiting for a peer that does not read.
            writer.close()
            tasks.discard(task)

    server = await asyncio.start_server(handle, host, port, ssl=tls)
    endpoint.port = server.sockets[0].getsockname()[1]
    try:
        yield endpoint
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tuple(tasks), timeout=BOUND_S)


def answering(answer: bytes) -> Script:
    """Return a script that answers every request with `answer`."""

    async def script(stream: Stream) -> None:
        while True:
            await stream.request()
            await stream.write(answer)

    return script


async def hanging(stream: Stream) -> None:
    """Read a request and never answer."""
    await stream.request()
    await stream.gone()


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """Reserve a port on which no process listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        yield port
