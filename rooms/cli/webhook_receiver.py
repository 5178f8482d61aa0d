"""Receive webhooks on this machine: verify their signatures, and answer by a failure plan.

Implements the receiver's side of Standard Webhooks.
"""

import hmac
import socket
import threading
import time
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

PREFIX: Final = "whsec_"
TOLERANCE_S: Final = 300
MAX_BODY_BYTES: Final = 4 * 1024 * 1024
_IDLE_S: Final = 75
_MAX_REMEMBERED: Final = 100_000
_POLL_S: Final = 0.05
_DRAIN_TIMEOUT_S: Final = 5.0
_DISCARD_CHUNK_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class SignatureCheck:
    """Hold the result of a signature check, with the reason if it failed."""

    valid: bool
    reason: str = ""


def parse_secret(text: str) -> bytes:
    """Return the key of `whsec_…`. Raise ValueError, without the secret in it, if it is invalid."""
    if not text.startswith(PREFIX):
        raise ValueError(f"a signing secret begins with {PREFIX}")
    try:
        return b64decode(text.removeprefix(PREFIX), validate=True)
    except ValueError as exc:
        raise ValueError(f"a signing secret is {PREFIX} followed by base64") from exc


def verify(
    keys: Sequence[bytes], headers: Mapping[str, str], body: bytes, *, now_s: float
) -> SignatureCheck:
    """Verify a webhook by its headers (names in lower case) and the exact bytes of its body."""
    missing = [
        name
        for name in ("webhook-id", "webhook-timestamp", "webhook-signature")
        if not headers.get(name)
    ]
    if missing:
        return SignatureCheck(False, f"no {', '.join(missing)}")
    identity, timestamp = headers["webhook-id"], headers["webhook-timestamp"]
    if not timestamp.isascii() or not timestamp.isdigit():
        return SignatureCheck(False, "webhook-timestamp is not a number of seconds")
    if abs(now_s - int(timestamp)) > TOLERANCE_S:
        return SignatureCheck(False, f"webhook-timestamp is more than {TOLERANCE_S} s from now")
    signed = f"{identity}.{timestamp}.".encode() + body
    expected = [b64encode(hmac.digest(key, signed, "sha256")) for key in keys]
    found = [
        value.encode()
        for version, _, value in _parse_signatures(headers["webhook-signature"])
        if version == "v1"
    ]
    # Comparing every pair keeps the time independent of which one fits.
    fits = [hmac.compare_digest(one, other) for one in expected for other in found]
    return (
        SignatureCheck(True) if any(fits) else SignatureCheck(False, "no signature fits the secret")
    )


def _parse_signatures(value: str) -> list[tuple[str, str, str]]:
    return [part.partition(",") for part in value.split()]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePlan:
    """Define how to answer.

    The first `failures` attempts of each webhook-id (None: every attempt) fail with `status`, or
    hang.
    """

    keys: tuple[bytes, ...] = ()
    failures: int | None = 0
    status: int = HTTPStatus.SERVICE_UNAVAILABLE
    hang: bool = False
    delay_ms: int = 0

    def fails(self, attempt: int) -> bool:
        """Return True if this attempt (counted from 1) must fail."""
        return self.failures is None or attempt <= self.failures


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """Hold one request. `attempt` counts those of its webhook-id; `answered` None: left hanging."""

    at: datetime
    path: str
    headers: Mapping[str, str]
    body: bytes
    attempt: int
    signature_check: SignatureCheck | None
    answered: int | None

    @property
    def identity(self) -> str | None:
        return self.headers.get("webhook-id")


class _InFlight:
    """Count requests that are being answered, so that a stop can wait for them."""

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

    def wait_idle(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0, timeout_s)


@dataclass(slots=True)
class _AttemptCounter:
    """Count the attempts of each webhook-id. Forgets the oldest ids."""

    counts: OrderedDict[str, int] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, identity: str | None) -> int:
        if identity is None:
            return 1
        with self.lock:
            count = self.counts[identity] = self.counts.pop(identity, 0) + 1
            if len(self.counts) > _MAX_REMEMBERED:
                self.counts.popitem(last=False)
        return count


class WebhookReceiver(ThreadingHTTPServer):
    """Serve until `stop`, or until `max_requests` requests were answered.

    `on_webhook` is called for each webhook before its answer, one at a time.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        failure_plan: FailurePlan,
        on_webhook: Callable[[Webhook], None],
        *,
        max_requests: int | None = None,
    ) -> None:
        self.failure_plan = failure_plan
        self.attempts = _AttemptCounter()
        self.in_flight = _InFlight()
        self.stopping = threading.Event()
        self.failure: Exception | None = None
        self._on_webhook = on_webhook
        self._remaining = max_requests
        self._lock = threading.Lock()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        """Return the address that it listens on."""
        host, port = self.server_address[:2]
        name = host.decode() if isinstance(host, bytes | bytearray) else str(host)
        return f"http://{f'[{name}]' if ':' in name else name}:{port}"

    def serve(self) -> None:
        """Serve until `stop`, and send pending answers. Raise what `on_webhook` raised."""
        try:
            self.serve_forever(poll_interval=_POLL_S)
        finally:
            self.stopping.set()
            self.in_flight.wait_idle(_DRAIN_TIMEOUT_S)
        if self.failure is not None:
            raise self.failure

    def dispatch(self, webhook: Webhook) -> bool:
        """Report a webhook. Return True if it was the last one, so that the receiver stops."""
        with self._lock:
            if self.failure is not None or self._remaining == 0:
                return False
            try:
                self._on_webhook(webhook)
            except Exception as exc:  # noqa: BLE001 - the main thread raises it, such as for a closed pipe
                self.failure = exc
                return True
            if self._remaining is not None:
                self._remaining -= 1
            return self._remaining == 0

    def stop(self) -> None:
        """End `serve`, from any thread, and release requests that hang."""
        self.stopping.set()
        threading.Thread(target=self.shutdown, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a caller that closed its connection."""


class _Handler(BaseHTTPRequestHandler):
    server: WebhookReceiver
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    # The answer is one write; waiting for more would cost 40 ms.
    disable_nagle_algorithm = True

    def receive(self) -> None:
        with self.server.in_flight:
            body = self._body()
            if body is None:
                return
            webhook = self._verify(body)
            last = self.server.dispatch(webhook)
            self.server.stopping.wait(self.server.failure_plan.delay_ms / 1000)
            if webhook.answered is not None:
                self._answer(webhook.answered)
            if last:
                self.server.stop()
            if webhook.answered is None:
                self._hang()

    def _verify(self, body: bytes) -> Webhook:
        plan = self.server.failure_plan
        headers = {name.lower(): value for name, value in self.headers.items()}
        attempt = self.server.attempts.count(headers.get("webhook-id"))
        verdict = verify(plan.keys, headers, body, now_s=time.time()) if plan.keys else None
        answered: int | None = HTTPStatus.OK
        if verdict is not None and not verdict.valid:
            answered = HTTPStatus.UNAUTHORIZED
        elif plan.fails(attempt):
            answered = None if plan.hang else plan.status
        return Webhook(
            at=datetime.now(UTC),
            path=self.path,
            headers=headers,
            body=body,
            attempt=attempt,
            signature_check=verdict,
            answered=answered,
        )

    do_POST = do_PUT = do_GET = receive  # noqa: N815 - http.server calls these names

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is http.server's
        """Log nothing: `on_webhook` reports each webhook."""

    def _body(self) -> bytes | None:
        """Return the whole body, or None if it was refused and answered, or cut off."""
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            self._answer(HTTPStatus.LENGTH_REQUIRED, close=True)
            return None
        if int(length) > MAX_BODY_BYTES:
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
        """Keep the connection open until the caller gives up, or the receiver stops."""
        self.close_connection = True
        self.connection.settimeout(_POLL_S)
        while not self.server.stopping.is_set():
            try:
                if not self.connection.recv(_DISCARD_CHUNK_BYTES):
                    return
            except TimeoutError:
                continue
