"""Where the webhooks go: nginx that answers 204 and writes what came, or a server of our own; each a process of its own.

    python -m tests.bench.sink --port N --log FILE [--hang-s 5] [--status 503]

Both write a line for each request: epoch seconds, path, webhook-id, Rooms-Message-Id, and (only this sink) the epoch
nanoseconds that the payload says it was sent at. Ours takes any address of 127.0.0.0/8, so that endpoints can be
different hosts.
"""

import argparse
import asyncio
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import IO, Final

import uvloop

from tests.bench.receiver import Connection, Tail, receive, receiving
from tests.bench.service import free_port

SENT: Final = b'"sent":'
SENT_DIGITS: Final = 19
_OK: Final = 204

NGINX: Final = """
worker_processes 1; worker_rlimit_nofile 20000; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.error;
events {{ worker_connections 8192; }}
http {{
  log_format arrivals '$msec $uri $http_webhook_id $http_rooms_message_id';
  access_log {log} arrivals buffer=64k flush=20ms;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  keepalive_requests 100000000; keepalive_timeout 300s; client_body_buffer_size 64k;
  server {{ listen 127.0.0.1:{port} backlog=4096; location / {{ return 204; }} }}
}}
"""


class _Connection(Connection):
    def __init__(self, log: IO[str], hang_s: float, status: int) -> None:
        self._log = log
        self._hang_s = hang_s
        length = "" if status == _OK else "Content-Length: 0\r\n"
        self._answers = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{length}\r\n".encode()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._url = b""
        self._ids = {b"webhook-id": b"-", b"rooms-message-id": b"-"}

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if (name := name.lower()) in self._ids:
            self._ids[name] = value

    def on_message_complete(self) -> None:
        at = self.body.find(SENT) + len(SENT)
        sent = self.body[at : at + SENT_DIGITS]
        if not sent.isdigit():
            sent = b"0"
        fields = b" ".join((self._url, *self._ids.values(), sent)).decode("ascii", errors="replace")
        self._log.write(f"{self.at:.6f} {fields}\n")
        if self._hang_s:
            asyncio.get_running_loop().call_later(self._hang_s, self._answer)
        else:
            self._answer()

    def _answer(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(self._answers)


@dataclass(slots=True)
class Arrivals:
    """Return the arrivals on paths that begin with `prefix`, as far as the log has been read."""

    prefix: str
    requests: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    webhooks: set[str] = field(default_factory=set)
    messages: dict[str, set[str]] = field(default_factory=dict)
    """Message ids by path."""
    latencies_ms: dict[str, list[float]] = field(default_factory=dict)
    """Return seconds from the payload's `sent` to arrival by path, where the sink records them."""

    def take(self, line: str) -> None:
        at_s, path, webhook, message, *sent_ns = line.split(" ")
        if not path.startswith(self.prefix):
            return
        self.requests += 1
        self.last_at = float(at_s)
        self.first_at = self.first_at or self.last_at
        self.webhooks.add(f"{path} {webhook}")
        self.messages.setdefault(path, set()).add(message)
        if sent_ns and sent_ns[0] != "0":
            self.latencies_ms.setdefault(path, []).append(
                (self.last_at - int(sent_ns[0]) / 1e9) * 1000
            )


@dataclass(slots=True)
class Sink:
    """A running sink."""

    kind: str
    port: int
    log: Tail
    _counted: int = 0
    _counted_to: int = 0

    def url(self, path: str, *, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def read(self, arrivals: Arrivals) -> Arrivals:
        """Read all lines since the last call by any caller."""
        for line in self.log.lines():
            arrivals.take(line)
        return arrivals

    def requests(self) -> int:
        """Return the total number of requests, without parsing them."""
        with self.log.path.open("rb") as reading:
            reading.seek(self._counted_to)
            while block := reading.read(1 << 20):
                self._counted += block.count(b"\n")
            self._counted_to = reading.tell()
        return self._counted


def _command(
    folder: Path, log: Path, port: int, hang_s: float, status: int, *, own: bool
) -> tuple[str, list[str]]:
    nginx = shutil.which("nginx")
    if nginx is None or own:
        command = [sys.executable, "-m", "tests.bench.sink", "--port", str(port), "--log", str(log)]
        return "httptools", [*command, "--hang-s", str(hang_s), "--status", str(status)]
    config = folder / f"nginx-{port}.conf"
    config.write_text(NGINX.format(folder=folder, log=log, port=port))
    return "nginx", [nginx, "-p", str(folder), "-c", str(config), "-e", str(folder / "nginx.error")]


@contextmanager
def sinking(
    folder: Path, *, own: bool = False, hang_s: float = 0.0, status: int = _OK
) -> Iterator[Sink]:
    """A sink on a free port: nginx where it is on PATH, else (and with `own`) ours, which can hang before its answer."""
    port = free_port()
    log = folder / f"arrivals-{port}.log"
    log.touch()
    kind, command = _command(folder, log, port, hang_s, status, own=own)
    try:
        with receiving(command, port):
            yield Sink(kind=kind, port=port, log=Tail(log))
    finally:
        log.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--hang-s", type=float, default=0.0)
    parser.add_argument("--status", type=int, default=_OK)
    given = parser.parse_args()
    with given.log.open("a", buffering=1 << 16) as log:
        uvloop.run(
            receive(
                lambda: _Connection(log, given.hang_s, given.status),
                given.port,
                host="0.0.0.0",
                log=log,
            )
        )


if __name__ == "__main__":
    os.umask(0o022)
    main()
