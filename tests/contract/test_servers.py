"""The servers that the launcher starts: reachable by their addresses, and what they were given outlives a kill."""

import socket
from collections.abc import Callable
from contextlib import closing
from urllib.parse import urlsplit

from rooms.embedded import Running
from tests.talk import Talk, make_queue


def test_a_queue_and_its_messages_outlive_a_killed_broker(artemis_server: Callable[..., Running]) -> None:
    server = artemis_server()
    with closing(Talk(server.url)) as talk:
        assert talk.greeting.startswith("CONNECTED")
        make_queue(talk, "q", "a")
        to = {"destination": r"a\c\cq", "destination-type": "ANYCAST", "persistent": "true", "receipt": "sent"}
        assert talk.ask("SEND", {**to}, "still here").startswith("RECEIPT")
    first = server.pid
    server.restart()
    assert server.pid != first
    with closing(Talk(server.url)) as talk:
        subscription = {"id": "s", "destination": r"a\c\cq", "subscription-type": "ANYCAST", "ack": "client"}
        assert talk.ask("SUBSCRIBE", {**subscription}).endswith("still here")
    server.wipe()
    server.start()
    with closing(Talk(server.url)) as talk:
        assert "does not exist" in talk.ask("SEND", {**to}, "nowhere")


def test_only_who_knows_the_password_is_let_in(artemis_url: str) -> None:
    with closing(Talk(artemis_url, password="guess")) as talk:
        assert talk.greeting.startswith("ERROR")


def test_naming_a_queue_does_not_make_it(artemis_url: str) -> None:
    with closing(Talk(artemis_url)) as talk:
        to = {"destination": "never-made", "destination-type": "ANYCAST", "receipt": "sent"}
        assert talk.ask("SEND", {**to}, "x").startswith("ERROR")


def test_a_frozen_zookeeper_says_nothing_until_it_is_thawed(zookeeper_server: Callable[[], Running]) -> None:
    server = zookeeper_server()
    parts = urlsplit(server.url)

    def asked(patience_s: float) -> bytes:
        with socket.create_connection((parts.hostname, parts.port), timeout=patience_s) as connection:
            connection.sendall(b"srvr")
            return connection.recv(4096)

    server.freeze()
    try:
        asked(0.5)
    except TimeoutError:
        pass
    else:
        raise AssertionError("a frozen server answered")
    server.thaw()
    assert asked(30).startswith(b"Zookeeper version: 3.9.5")


def test_the_shared_zookeeper_answers_at_its_address(zookeeper_url: str) -> None:
    parts = urlsplit(zookeeper_url)
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        connection.sendall(b"srvr")
        assert connection.recv(4096)
