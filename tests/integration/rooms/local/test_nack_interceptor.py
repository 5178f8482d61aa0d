"""Test what the broker does with a STOMP NACK, frame by frame and without Rooms.

Oracle: a message is at exactly one place. A NACK that cannot be carried out is answered by an
ERROR, ends its connection and leaves its message in the queue.
"""

import re
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import pytest

from rooms.local import FetchError, MissingError
from rooms.local.nack_interceptor import SOURCE
from tests.support.local_servers import TestServer, make_artemis, run_server
from tests.support.raw_stomp import Talk, destroy_queue, make_queue
from tests.support.servers import ARTEMIS_DOCKERFILE, unavailable

READ: Final = r"a\c\cread"
DEAD: Final = r"rooms-dead-letters\c\cdead"
_END: Final = "end"


@pytest.fixture(scope="module")
def broker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start one broker for all tests that do not kill theirs."""
    try:
        with run_server(make_artemis(tmp_path_factory.mktemp("artemis"))) as server:
            yield server.url
    except (MissingError, FetchError) as missing:
        unavailable(str(missing))


@pytest.fixture
def url(broker_url: str) -> Iterator[str]:
    """Return the address of a broker with the queue of a reader, and none for dead letters."""
    with closing(Talk(broker_url)) as talk:
        make_queue(talk, "read", "a")
    yield broker_url
    with closing(Talk(broker_url)) as talk:
        for name in ("read", "dead"):
            destroy_queue(talk, name)


def take_dead_letters(url: str, *, selector: str | None = None) -> None:
    with closing(Talk(url)) as talk:
        make_queue(talk, "dead", "rooms-dead-letters", selector=selector)


def send(url: str, destination: str, *bodies: str) -> None:
    to = {"destination": destination, "destination-type": "ANYCAST", "persistent": "true"}
    with closing(Talk(url)) as talk:
        for body in bodies:
            assert talk.ask("SEND", {**to, "receipt": "sent"}, body).startswith("RECEIPT")


@contextmanager
def reading(url: str, destination: str = READ, *, version: str = "1.2") -> Iterator[Talk]:
    with closing(Talk(url, version=version)) as talk:
        to = {"destination": destination, "subscription-type": "ANYCAST", "id": "s"}
        talk.tell(("SUBSCRIBE", {**to, "ack": "client-individual", "consumer-window-size": "-1"}))
        yield talk


def text(message: str) -> str:
    return message.partition("\n\n")[2]


def header(message: str, name: str) -> str:
    (found,) = [
        line.removeprefix(f"{name}:")
        for line in message.partition("\n\n")[0].splitlines()
        if line.startswith(f"{name}:")
    ]
    return found


def left(url: str, destination: str, count: int) -> set[str]:
    """Return the bodies in a queue, and check that there are only this many."""
    with reading(url, destination) as talk:
        found = {text(talk.next()) for _ in range(count)}
        send(url, destination, _END)
        assert text(talk.next()) == _END
    return found


@pytest.mark.parametrize("selector", [None, "wanted = 'other'"])
def test_nack_that_no_queue_for_dead_letters_takes_is_an_error_and_changes_nothing(
    url: str, selector: str | None
) -> None:
    """There is none, or its filter refuses the message."""
    if selector:
        take_dead_letters(url, selector=selector)
    send(url, READ, "1")
    with reading(url) as talk:
        rejected = header(talk.next(), "ack")
        answer = talk.ask("NACK", {"id": rejected, "receipt": "no"})
        assert answer.startswith("ERROR")
        assert header(answer, "message") == "this message cannot be rejected now"
        assert header(answer, "receipt-id") == "no"
        assert talk.next() == "", "the connection is still open"
    assert left(url, READ, 1) == {"1"}


def test_large_message_is_rejected_whole_and_outlives_a_kill(
    artemis_server: Callable[..., TestServer],
) -> None:
    """The broker keeps the body of such a message in a file of its own."""
    server = artemis_server()
    with closing(Talk(server.url)) as talk:
        make_queue(talk, "read", "a")
    body = "x" * 600_000
    send(server.url, READ, body)
    with reading(server.url) as talk:
        assert talk.ask("NACK", {"id": header(talk.next(), "ack")}).startswith("ERROR")
    take_dead_letters(server.url)
    with reading(server.url) as talk:
        nack = {"id": header(talk.next(), "ack"), "receipt": "done"}
        assert talk.ask("NACK", nack).startswith("RECEIPT")
    server.restart()
    assert left(server.url, DEAD, 1) == {body}
    assert left(server.url, READ, 0) == set()


def test_frames_behind_a_refused_nack_settle_nothing(url: str) -> None:
    """They are in one packet, so the broker has them before it closes the connection."""
    send(url, READ, "1", "2", "3")
    with reading(url) as talk:
        first, second, third = (header(talk.next(), "ack") for _ in range(3))
        talk.tell(("NACK", {"id": first}), ("NACK", {"id": second}), ("ACK", {"id": third}))
        while answer := talk.next():
            assert answer.startswith("ERROR")
    assert left(url, READ, 3) == {"1", "2", "3"}


def test_nack_of_more_than_a_thousand_messages_is_refused_and_changes_nothing(url: str) -> None:
    """With `ack:client` it rejects all before it: that must not keep the broker's thread."""
    take_dead_letters(url)
    count = 1001
    to = {"destination": READ, "destination-type": "ANYCAST", "persistent": "true"}
    with closing(Talk(url)) as talk:
        talk.tell(*[("SEND", {**to})] * (count - 1), ("SEND", {**to, "receipt": "sent"}), body="x")
        assert talk.next().startswith("RECEIPT")
    for index, answer in ((count - 1, "ERROR"), (count - 2, "RECEIPT")):
        with closing(Talk(url)) as talk:
            to_read = {"destination": READ, "subscription-type": "ANYCAST", "id": "s"}
            talk.tell(("SUBSCRIBE", {**to_read, "ack": "client", "consumer-window-size": "-1"}))
            acks = [header(talk.next(), "ack") for _ in range(count)]
            assert talk.ask("NACK", {"id": acks[index], "receipt": "done"}).startswith(answer)
    assert left(url, READ, 1) == {"x"}
    assert left(url, DEAD, count - 1) == {"x"}


def test_stomp_1_2_takes_no_notice_of_the_header_subscription(url: str) -> None:
    """The broker neither: it would destroy the message if the interceptor did."""
    take_dead_letters(url)
    send(url, READ, "1")
    with reading(url) as talk:
        rejected = header(talk.next(), "ack")
        answer = talk.ask("NACK", {"id": rejected, "subscription": "other", "receipt": "done"})
        assert answer.startswith("RECEIPT")
    assert left(url, DEAD, 1) == {"1"}
    assert left(url, READ, 0) == set()


def test_stomp_1_1_rejects_by_message_and_subscription_only(url: str) -> None:
    take_dead_letters(url)
    send(url, READ, "1", "2")
    for wrong in ({"subscription": "other"}, {}):
        with reading(url, version="1.1") as talk:
            rejected, _ = (header(talk.next(), "message-id") for _ in range(2))
            refusal = talk.ask("NACK", {"message-id": rejected, **wrong})
            assert header(refusal, "message") == "this connection has no such message"
    with reading(url, version="1.1") as talk:
        by_body = {text(frame): header(frame, "message-id") for frame in (talk.next(), talk.next())}
        nack = {"message-id": by_body["1"], "id": by_body["2"], "subscription": "s"}
        assert talk.ask("NACK", {**nack, "receipt": "done"}).startswith("RECEIPT")
    assert left(url, DEAD, 1) == {"1"}
    assert left(url, READ, 1) == {"2"}


def test_commands_of_the_image_make_the_same_classes(tmp_path: Path) -> None:
    """Run those of the Dockerfile, with the fetched broker's libraries in place of the image's."""
    server = make_artemis(tmp_path / "broker")
    try:
        server.prepare()
    except (MissingError, FetchError) as missing:
        unavailable(str(missing))
    (libraries,) = (server.cache / server.package.folder).glob("*/lib")
    (commands,) = re.findall(r"^RUN ((?:.*\\\n)*.*)$", ARTEMIS_DOCKERFILE.read_text(), re.MULTILINE)
    (tmp_path / SOURCE.name).write_bytes(SOURCE.read_bytes())
    subprocess.run(
        ["/bin/sh", "-c", commands.replace("/opt/artemis/lib", str(libraries))],
        check=True,
        cwd=tmp_path,
    )

    def classes(jar: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(jar) as archive:
            return {name: archive.read(name) for name in archive.namelist() if "class" in name}

    made = classes(tmp_path / "nack-interceptor.jar")
    assert made == classes(server.folder / "lib/nack-interceptor.jar")
    assert "rooms/NackInterceptor.class" in made
