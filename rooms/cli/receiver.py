"""A webhook receiver for one's own machine: reads each request whole, says what came, and answers as it was told."""

import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from rooms.cli.signature import Verdict, verify

LARGEST_BODY: Final = 4 * 1024 * 1024
_IDLE_S: Final = 75
_MOST_REMEMBERED: Final = 100_000
_POLL_S: Final = 0.05
_LAST_ANSWERS_S: Final = 5.0
_DISCARDED_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """How to answer. The first `fail` attempts of each webhook-id (None: every one) fail by `status`, or by hanging."""

    keys: tuple[bytes, ...] = ()
    fail: int | None = 0
    status: int = HTTPStatus.SERVICE_UNAVAILABLE
    hang: bool = False
    delay_ms: int = 0

    def fails(self, attempt: int) -> bool:
        """Whether this attempt (1 is the first) has to fail."""
        return self.fail is None or attempt <= self.fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """One request as it came. `attempt` counts those of its webhook-id from 1; `answered` None: left hanging."""

    at: datetime
    path: str
    headers: Mapping[str, str]
    body: bytes
    attempt: int
    verdict: Verdict | None
    answered: int | None

    @property
    def identity(self) -> str | None:
        return self.headers.get("webhook-id")


class _Underway:
    """Counts the requests that are being answered, so that the end can wait for them."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait_none(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0, timeout_s)


@dataclass(slots=True)
class _Attempts:
    """How often each webhook-id came; forgets the oldest ones."""

    counts: OrderedDict[str, int] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, identity: str | None) -> int:
        if identity is None:
            return 1
        with self.lock:
            count = self.counts[identity] = self.counts.pop(identity, 0) + 1
            if len(self.counts) > _MOST_REMEMBERED:
                self.counts.popitem(last=False)
        return count


class Receiver(ThreadingHTTPServer):
    """Serves until `stop`, or until `most` requests were answered. `hear` is called for each webhook before its
    answer, one at a time.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        behaviour: Behaviour,
        hear: Callable[[Webhook], None],
        *,
        most: int | None = None,
    ) -> None:
        self.behaviour = behaviour
        self.attempts = _Attempts()
        self.underway = _Underway()
        self.stopping = threading.Event()
        self.failure: Exception | None = None
        self._hear = hear
        self._left = most
        self._turn = threading.Lock()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.server_address[:2]
        name = host.decode() if isinstance(host, bytes | bytearray) else str(host)
        return f"http://{f'[{name}]' if ':' in name else name}:{port}"

    def serve(self) -> None:
        """Serve until `stop`; raises what `hear` raised. Answers under way go out before it returns."""
        try:
            self.serve_forever(poll_interval=_POLL_S)
        finally:
            self.stopping.set()
            self.underway.wait_none(_LAST_ANSWERS_S)
        if self.failure is not None:
            raise self.failure

    def tell(self, webhook: Webhook) -> bool:
        """Pass a webhook on. True where it was the last one, so that the receiver stops once it is answered."""
        with self._turn:
            if self.failure is not None or self._left == 0:
                return False
            try:
                self._hear(webhook)
            except Exception as exc:  # noqa: BLE001 - a closed pipe, say: carried to the main thread, which raises it
                self.failure = exc
                return True
            if self._left is not None:
                self._left -= 1
            return self._left == 0

    def stop(self) -> None:
        """End `serve`, from any thread, and let go of what hangs."""
        self.stopping.set()
        threading.Thread(target=self.shutdown, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went away is no error of ours."""


class _Handler(BaseHTTPRequestHandler):
    server: Receiver
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    # The answer goes out in one piece; waiting for more of it would cost 40 ms each time.
    disable_nagle_algorithm = True

    def receive(self) -> None:
        with self.server.underway:
            body = self._body()
            if body is None:
                return
            webhook = self._judge(body)
            last = self.server.tell(webhook)
            self.server.stopping.wait(self.server.behaviour.delay_ms / 1000)
            if webhook.answered is not None:
                self._answer(webhook.answered)
            if last:
                self.server.stop()
            if webhook.answered is None:
                self._hang()

    def _judge(self, body: bytes) -> Webhook:
        behaviour = self.server.behaviour
        headers = {name.lower(): value for name, value in self.headers.items()}
        attempt = self.server.attempts.count(headers.get("webhook-id"))
        verdict = verify(behaviour.keys, headers, body, now_s=time.time()) if behaviour.keys else None
        answered: int | None = HTTPStatus.OK
        if verdict is not None and not verdict.genuine:
            answered = HTTPStatus.UNAUTHORIZED
        elif behaviour.fails(attempt):
            answered = None if behaviour.hang else behaviour.status
        return Webhook(
            at=datetime.now(UTC),
            path=self.path,
            headers=headers,
            body=body,
            attempt=attempt,
            verdict=verdict,
            answered=answered,
        )

    do_POST = do_PUT = do_GET = receive  # noqa: N815 - http.server looks for these names

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is http.server's
        """Each webhook is told by the receiver instead."""

    def _body(self) -> bytes | None:
        """The whole body; None where it was refused and answered, or broke off."""
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            self._answer(HTTPStatus.LENGTH_REQUIRED, close=True)
            return None
        if int(length) > LARGEST_BODY:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, close=True)
            return None
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True
            return None
        return body

    def _answer(self, status: int, *, close: bool = False) -> None:
        self.close_connection = self.close_connection or close
        try:
            phrase = HTTPStatus(status).phrase
        except ValueError:
            phrase = "Unknown"
        ending = "Connection: close\r\n" if close else ""
        length = "" if status == HTTPStatus.NO_CONTENT else "Content-Length: 0\r\n"
        self.wfile.write(f"HTTP/1.1 {status} {phrase}\r\n{length}{ending}\r\n".encode("latin-1"))

    def _hang(self) -> None:
        """Keep the connection without a word until the caller gives up, or we stop."""
        self.close_connection = True
        self.connection.settimeout(_POLL_S)
        while not self.server.stopping.is_set():
            try:
                if not self.connection.recv(_DISCARDED_BYTES):
                    return
            except TimeoutError:
                continue
