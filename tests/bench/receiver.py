"""Start and stop the webhook receiver of a benchmark in its own process, and read its log."""

import asyncio
import contextlib
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, cast

import httptools

from tests.bench.service import ROOT

_FLUSH_S: Final = 0.02
_BACKLOG: Final = 4096
_START_TIMEOUT_S: Final = 20.0


class Connection(asyncio.Protocol):
    """One connection.

    Requests are answered in their order, since none is sent before the last one's answer.

    Who inherits answers in `on_message_complete`, when the request began at `at` (epoch seconds)
    and `body` is there.
    """

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not descend from asyncio's.
        self.transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.at, self.body = time.time(), b""

    def on_body(self, body: bytes) -> None:
        self.body += body


async def receive(
    connection: Callable[[], Connection],
    port: int,
    *,
    host: str = "127.0.0.1",
    log: IO[str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve until SIGTERM. What is written to the log can be read there soon after."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    async with await loop.create_server(connection, host, port, backlog=_BACKLOG, ssl=tls):
        while log is not None and not stopped.is_set():
            log.flush()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), _FLUSH_S)
        await stopped.wait()
    if log is not None:
        log.flush()


@contextmanager
def receiving(command: Sequence[str], port: int) -> Iterator[None]:
    """Run this command until the block ends; yield once it listens on its loopback port."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT)
    try:
        until = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > until or process.poll() is not None:
                    raise
                time.sleep(0.02)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_START_TIMEOUT_S)


@dataclass(slots=True)
class Tail:
    """Read lines appended to a file since the last read."""

    path: Path
    _read: int = 0
    _rest: str = ""

    def lines(self) -> list[str]:
        """Whole lines, in ASCII."""
        with self.path.open("rb") as reading:
            reading.seek(self._read)
            text = self._rest + reading.read().decode("ascii")
            self._read = reading.tell()
        *lines, self._rest = text.split("\n")
        return lines
