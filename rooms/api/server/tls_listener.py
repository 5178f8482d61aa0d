"""Listen with TLS: hand each connection to the HTTP protocol once its handshake is complete.

A connection counts among all others from its first moment, so handshakes are bounded like requests.
New files are used for new connections. A connection whose certificate is revoked or has expired is
closed at once. After a change of authorities, connections that had a certificate are closed after
the answers under way.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, cast

from rooms.api.client_identity import STATE_KEY, ClientCertificate, read_certificate
from rooms.api.server.connections import ConnectionRegistry
from rooms.api.server.tls_files import LoadedTls, TlsFileError, TlsFiles, load_tls
from rooms.api.server.uvicorn_internals import get_remote_addr
from rooms.domain.member_identity import CertificateRules

_log = logging.getLogger(__name__)

CHECK_S: Final = 5.0
"""Seconds between two looks at the files, and at the certificates of open connections."""
_CLOSE_GRACE_S: Final = 30.0
"""Seconds for answers under way, after a change of authorities."""
_SHUTDOWN_S: Final = 2.0
"""Seconds in which a client answers the end of TLS."""
_NOT_YET_VALID, _EXPIRED, _REVOKED = 9, 10, 23
_NO_LIST, _LIST_NOT_YET_VALID, _LIST_EXPIRED = 3, 11, 12


class HandshakeOutcome(StrEnum):
    """Say how a handshake ended, as metrics name it."""

    DONE = "done"
    TIMEOUT = "timeout"
    CLOSED = "closed"
    """The client disconnected, or made room for others."""
    PROTOCOL = "protocol"
    """No common version or cipher, or no TLS at all."""
    NO_CERTIFICATE = "no_certificate"
    NOT_YET_VALID = "not_yet_valid"
    EXPIRED = "expired"
    REVOKED = "revoked"
    UNTRUSTED = "untrusted"
    """Of an unknown authority, or not for clients."""
    REVOCATION_LIST = "revocation_list"
    """The list of the authority is missing or has expired: all its clients are refused."""


_BY_CODE: Final = {
    _NOT_YET_VALID: HandshakeOutcome.NOT_YET_VALID,
    _EXPIRED: HandshakeOutcome.EXPIRED,
    _REVOKED: HandshakeOutcome.REVOKED,
    _NO_LIST: HandshakeOutcome.REVOCATION_LIST,
    _LIST_NOT_YET_VALID: HandshakeOutcome.REVOCATION_LIST,
    _LIST_EXPIRED: HandshakeOutcome.REVOCATION_LIST,
}


def _outcome_of(error: Exception) -> HandshakeOutcome:
    match error:
        case ssl.SSLCertVerificationError():
            return _BY_CODE.get(error.verify_code, HandshakeOutcome.UNTRUSTED)
        case ssl.SSLError(reason="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
            return HandshakeOutcome.NO_CERTIFICATE
        case ssl.SSLError():
            return HandshakeOutcome.PROTOCOL
        case ConnectionAbortedError() if "longer" in str(error):
            return HandshakeOutcome.TIMEOUT
        case _:
            return HandshakeOutcome.CLOSED


class TlsListener:
    """Accept connections with the newest files.

    `count` gets the outcome of each handshake; `report` what was loaded, or None where new files
    cannot be used and the former ones stay. TlsFileError: they cannot be used from the start.
    """

    def __init__(
        self,
        files: TlsFiles,
        rules: CertificateRules,
        registry: ConnectionRegistry,
        *,
        count: Callable[[HandshakeOutcome], None] = lambda _: None,
        report: Callable[[LoadedTls | None], None] = lambda _: None,
        check_s: float = CHECK_S,
    ) -> None:
        self.registry = registry
        self.count = count
        self._files = files
        self._rules = rules
        self._report = report
        self._check_s = check_s
        self._signature = files.signature()
        self._loaded = load_tls(files)
        self._failure = ""
        """The error of the newest files; empty: they are in use."""
        self._open: set[Handshake] = set()
        self._watch: asyncio.Task[None] | None = None
        report(self._loaded)

    @property
    def loaded(self) -> LoadedTls:
        """Return what new connections use."""
        return self._loaded

    async def listen(
        self,
        host: str,
        port: int,
        open_protocol: Callable[[dict[str, Any]], asyncio.Protocol],
        connections: Iterable[Any],
    ) -> asyncio.Server:
        """Listen, and watch the files. OSError.

        `open_protocol` gets the ASGI state of a connection, with its certificate; `connections` are
        the protocols that are open.
        """
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Handshake(self, open_protocol), host, port)
        self._watch = asyncio.create_task(self._watch_files(connections))
        return server

    async def close(self) -> None:
        """End the handshakes under way, and stop watching."""
        for handshake in list(self._open):
            handshake.drop()
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch

    def certificate_of(self, transport: asyncio.Transport) -> ClientCertificate | None:
        """Return the certificate of a complete handshake. ValueError: it cannot be read.

        ConnectionResetError: the client disconnected before its end.
        """
        tls = transport.get_extra_info("ssl_object")
        if tls is None:
            raise ConnectionResetError
        content = tls.getpeercert(binary_form=True)
        return None if content is None else read_certificate(content, self._rules)

    def note_open(self, handshake: "Handshake") -> None:
        """Note a handshake under way."""
        self._open.add(handshake)

    def note_end(self, handshake: "Handshake") -> None:
        """Note that a handshake has ended."""
        self._open.discard(handshake)

    async def _watch_files(self, connections: Iterable[Any]) -> None:
        while True:
            await asyncio.sleep(self._check_s)
            try:
                signature = self._files.signature()
                changed = signature != self._signature
                if changed or self._failure:
                    self._signature = signature
                    await self._reload(connections, changed=changed)
                self._close_ended(connections)
            except Exception:  # noqa: BLE001 - no certificate would be renewed or revoked any more
                _log.exception("a check of the files of TLS failed; the next one follows")

    async def _reload(self, connections: Iterable[Any], *, changed: bool) -> None:
        try:
            loaded = await asyncio.to_thread(load_tls, self._files)
        except Exception as exc:  # noqa: BLE001 - any other error is tried again and reported, too
            failure = str(exc) if isinstance(exc, TlsFileError) else f"{type(exc).__name__}: {exc}"
            if changed or failure != self._failure:
                _log.error("the former files of TLS stay in use: %s", failure)
                self._failure = failure
                self._report(None)
            return
        former, self._loaded, self._failure = self._loaded, loaded, ""
        self._report(loaded)
        _log.warning("the files of TLS were read again")
        if loaded.authorities != former.authorities:
            retired = [one for one in list(connections) if _certificate(one) is not None]
            asyncio.get_running_loop().call_later(_CLOSE_GRACE_S, _abort_all, retired)
            for connection in retired:
                connection.shutdown()

    def _close_ended(self, connections: Iterable[Any]) -> None:
        """Close connections whose certificate would be refused now."""
        now, revoked = datetime.now(UTC), self._loaded.revoked
        for connection in list(connections):
            certificate = _certificate(connection)
            if certificate is None:
                continue
            if certificate.is_over(now) or certificate.is_revoked(revoked):
                self.registry.count_closed("certificate")
                connection.transport.abort()


def _certificate(connection: Any) -> ClientCertificate | None:
    found: ClientCertificate | None = connection.app_state.get(STATE_KEY)
    return found


def _abort_all(connections: Iterable[Any]) -> None:
    for connection in connections:
        connection.transport.abort()


class Handshake(asyncio.Protocol):
    """Be a connection until its handshake is complete; then another protocol serves it."""

    def __init__(
        self,
        listener: TlsListener,
        open_protocol: Callable[[dict[str, Any]], asyncio.Protocol],
    ) -> None:
        self._listener = listener
        self._open_protocol = open_protocol
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._early_data: list[bytes] = []
        """Bytes from before TLS began, as uvloop reads at once; later, those from its end."""
        self._lost = False
        self.address: str | None = None

    @property
    def unsent_bytes(self) -> int:
        """Return 0: no answer waits."""
        return 0

    @property
    def idle(self) -> bool:
        """Return True: the client has sent no request."""
        return True

    @property
    def awaits_body(self) -> bool:
        """Return False: the client has sent no request."""
        return False

    def check_timeouts(self, now: float) -> None:
        """Leave it: the handshake has a deadline of its own."""

    def drop(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake, or close the connection where there is no place."""
        self._transport = cast("asyncio.Transport", transport)
        client = get_remote_addr(self._transport)
        self.address = client[0] if client else None
        self._transport.pause_reading()  # its bytes are for TLS
        if not self._listener.registry.add(self):
            self.drop()
            return
        self._listener.note_open(self)
        self._task = asyncio.get_running_loop().create_task(self._serve(self._transport))

    def data_received(self, data: bytes) -> None:
        """Keep what came before the other protocol was there."""
        self._early_data.append(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio calls it
        """Note that no client is there any more."""
        self._lost = True
        self._listener.registry.remove(self)

    def _feed_tls(self, transport: asyncio.Transport, early_data: Iterable[bytes]) -> None:
        """Pass on what the client sent before TLS began, as the transport would."""
        protocol = cast("asyncio.BufferedProtocol", transport.get_protocol())
        for data in early_data:
            rest = memoryview(data)
            while rest:
                buffer = memoryview(protocol.get_buffer(len(rest)))
                size = min(len(rest), len(buffer))
                buffer[:size] = rest[:size]
                protocol.buffer_updated(size)
                rest = rest[size:]

    async def _serve(self, transport: asyncio.Transport) -> None:
        listener, loaded = self._listener, self._listener.loaded
        loop = asyncio.get_running_loop()
        loop.call_soon(self._feed_tls, transport, self._early_data)  # before the handshake begins
        self._early_data = []
        try:
            tls = await loop.start_tls(
                transport,
                self,
                loaded.context,
                server_side=True,
                ssl_handshake_timeout=listener.registry.limits.head_timeout_s,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
            if tls is None or self._lost:
                raise ConnectionResetError
            certificate = listener.certificate_of(tls)
            if certificate is not None and loaded.authorities != listener.loaded.authorities:
                raise ConnectionResetError  # its authority may be trusted no more
        except Exception as exc:  # noqa: BLE001 - the connection would stay, and be counted nowhere
            if not isinstance(exc, (OSError, ValueError)):
                _log.exception("a TLS handshake failed")
            listener.count(_outcome_of(exc))
            transport.abort()
            return
        finally:
            listener.note_end(self)
            listener.registry.remove(self)
        listener.count(HandshakeOutcome.DONE)
        protocol = self._open_protocol({} if certificate is None else {STATE_KEY: certificate})
        tls.set_protocol(protocol)
        protocol.connection_made(tls)
        for data in self._early_data:
            if not tls.is_closing():
                protocol.data_received(data)
