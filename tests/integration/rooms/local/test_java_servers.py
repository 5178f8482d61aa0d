"""Test the local servers: they answer at their addresses, and their data outlives a kill."""

import socket
from collections.abc import Callable
from contextlib import closing
from urllib.parse import urlsplit

from tests.support.local_servers import TestServer
from tests.support.raw_stomp import Talk, make_queue


def test_a_queue_and_its_messages_outlive_a_killed_broker(
    artemis_server: Callable[..., TestServer],
) -> None:
    server = artemis_server()
    with closing(Talk(server.url)) as talk:
        assert talk.greeting.startswith("CONNECTED")
        make_queue(talk, "q", "a")
        to = {
            "destination": r"a\c\cq",
            "destination-type": "ANYCAST",
            "persistent": "true",
            "receipt": "sent",
        }
        assert talk.ask("SEND", {**to}, "still here").startswith("RECEIPT")
    first = server.pid
    server.restart()
    assert server.pid != first
    with closing(Talk(server.url)) as talk:
        subscription = {
            "id": "s",
            "destination": r"a\c\cq",
            "subscription-type": "ANYCAST",
            "ack": "client",
        }
        assert talk.ask("SUBSCRIBE", {**subscription}).endswith("still here")
    server.erase()
    server.start()
    with closing(Talk(server.url)) as talk:
        assert "does not exist" in talk.ask("SEND", {**to}, "nowhere")


def test_wrong_password_is_refused(artemis_url: str) -> None:
    with closing(Talk(artemis_url, password="guess")) as talk:
        assert talk.greeting.startswith("ERROR")


def test_subscribing_does_not_create_a_queue(artemis_url: str) -> None:
    with closing(Talk(artemis_url)) as talk:
        to = {"destination": "never-made", "destination-type": "ANYCAST", "receipt": "sent"}
        assert talk.ask("SEND", {**to}, "x").startswith("ERROR")


def test_suspended_zookeeper_answers_after_resume(
    zookeeper_server: Callable[[], TestServer],
) -> None:
    server = zookeeper_server()
    parts = urlsplit(server.url)

    def asked(patience_s: float) -> bytes:
        with socket.create_connection(
            (parts.hostname, parts.port), timeout=patience_s
        ) as connection:
            connection.sendall(b"srvr")
            return connection.recv(4096)

    server.suspend()
    try:
        asked(0.5)
    except TimeoutError:
        pass
    else:
        raise AssertionError("a frozen server answered")
    server.resume()
    assert asked(30).startswith(b"Zookeeper version: 3.9.5")


def test_the_shared_zookeeper_answers_at_its_address(zookeeper_url: str) -> None:
    parts = urlsplit(zookeeper_url)
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        connection.sendall(b"srvr")
        assert connection.recv(4096)
