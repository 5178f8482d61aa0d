"""Open a socket to the first broker that answers, and do the STOMP handshake on it.

`stomp.py` finds the host and speaks TLS with it; the frames are parsed by this package.
"""

import logging
import socket
from contextlib import suppress
from typing import Any, NamedTuple

from stomp.exception import StompException
from stomp.transport import Transport

from delivery.brokers.artemis.connection import error_text
from delivery.brokers.artemis.frames import FastDecode, FrameParser, encode, header
from rooms.backend_urls import StompUrl

# It logs every attempt; the caller gets the error.
logging.getLogger("stomp.py").setLevel(logging.CRITICAL)


class OpenedSocket(NamedTuple):
    """Hold a connection whose handshake is done; 0 s: no heart-beats in that direction."""

    connection: socket.socket
    parser: FrameParser[Any]
    send_every_s: float
    expect_every_s: float


def connect_socket(url: StompUrl) -> socket.socket:
    """Connect to the first host that answers, with TLS if asked for. OSError. Blocks the thread."""
    timeout_s = url.connect_timeout_ms / 1000
    transport = Transport(
        list(url.hosts),
        prefer_localhost=False,
        try_loopback_connect=False,
        reconnect_sleep_initial=0,
        reconnect_sleep_jitter=0,
        reconnect_attempts_max=1,
        timeout=timeout_s,
        keepalive=True,
        auto_decode=False,
    )
    if url.tls:
        transport.set_ssl(
            url.hosts,
            ca_certs=url.ca,
            cert_file=url.certificate,
            key_file=url.key,
            verify=url.verify,
        )
    transport.override_threading(lambda _loop: None)
    try:
        transport.start()
    except StompException as exc:
        hosts = ", ".join(f"{host}:{port}" for host, port in url.hosts)
        raise ConnectionError(f"no broker answers at {hosts}") from exc
    connection: socket.socket = transport.socket
    if not transport.blocking:
        transport.shutdown_queue()  # stomp.py's own way to write to TLS connections
    connection.settimeout(timeout_s)
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def handshake(url: StompUrl, fast_decode: FastDecode[Any] | None) -> OpenedSocket:
    """Connect and log in. OSError, ProtocolError, ValueError. Blocks: call it in a thread."""
    connection = connect_socket(url)
    try:
        parser = FrameParser(fast_decode)
        headers = {
            "accept-version": "1.2",
            "host": url.hosts[0][0],
            "login": url.user,
            "passcode": url.password,
            "heart-beat": f"{url.heartbeat_ms},{url.heartbeat_ms}",
        }
        connection.sendall(encode("CONNECT", headers))
        while not (frames := parser.feed(_receive(connection))):
            pass
        (answer, *_) = frames
        if answer.command != b"CONNECTED":
            raise ConnectionError(f"the broker refused the connection: {error_text(answer)}")
        server_sends_ms, server_wants_ms = (
            int(part) for part in (header(answer.head, b"heart-beat") or b"0,0").split(b",")
        )
        interval_ms = url.heartbeat_ms
        return OpenedSocket(
            connection,
            parser,
            max(interval_ms, server_wants_ms) / 1000 if server_wants_ms else 0.0,
            max(interval_ms, server_sends_ms) / 1000 if server_sends_ms else 0.0,
        )
    except BaseException:
        connection.close()
        raise


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(65_536)
    if not data:
        raise ConnectionResetError("the broker closed the connection instead of a greeting")
    return data
