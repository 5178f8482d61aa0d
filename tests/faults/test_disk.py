"""Fill the file system of the data folder.

Oracle: accepted messages wait, rejected ones are answered 503, and everything continues without intervention once
there is space again.
"""

import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.support.polling import until
from tests.support.room import Place
from tests.support.service import Service, running
from tests.support.small_disk import CannotMountError, fill, mounted
from tests.support.webhook_sink import Sink, sinking

SIZE_MIB: Final = 256
BIG: Final = 100_000
"""Bytes of payload: a few of them need more room than PostgreSQL has made for itself in advance."""
OURS: Final = ("serve", "worker", "upkeep")
UNDELIVERED: Final = (
    "SELECT state FROM deliveries WHERE subscription_id = %s AND state <> 'delivered'"
)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    if sys.platform != "linux":
        pytest.skip("mounts as Linux does")
    with ExitStack() as stack:
        try:
            stack.enter_context(mounted(tmp_path / "rooms", mib=SIZE_MIB))
        except CannotMountError as missing:
            pytest.skip(str(missing))  # a right, not a service that is missing
        yield stack.enter_context(running(tmp_path))


@pytest.fixture
def sink() -> Iterator[Sink]:
    with sinking() as sink:
        yield sink


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Not a block is free."""
    path = fill(folder)
    try:
        assert not os.statvfs(folder).f_bavail
        yield
    finally:
        path.unlink()


def accepted(answer: httpx.Response) -> bool:
    """Return whether the answer is a 202; any other must be a 503 with Retry-After."""
    if answer.status_code == httpx.codes.ACCEPTED:
        return True
    assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["content-type"] == "application/problem+json"
    return False


@dataclass(slots=True)
class Publisher:
    """Publishes messages that are all different, and knows which were taken."""

    place: Place
    payloads: dict[str, str] = field(default_factory=dict)
    """By their Idempotency-Keys."""
    refused: set[str] = field(default_factory=set)

    def publish(self, size: int) -> bool:
        """A new message; whether it was taken."""
        key = secrets.token_hex(8)
        self.payloads[key] = key + secrets.token_hex(size // 2)
        return self._ask(key)

    def again(self) -> None:
        """Publish the rejected messages again until all are accepted."""
        for key in list(self.refused):
            until(partial(self._ask, key), "a publish to be taken")

    def _ask(self, key: str) -> bool:
        taken = accepted(self.place.try_publish(self.payloads[key], key=key))
        (self.refused.discard if taken else self.refused.add)(key)
        return taken


def live(service: Service) -> bool:
    with suppress(httpx.TransportError):
        return service.http.get("/health/live").status_code == httpx.codes.OK
    return False


def ready(service: Service) -> bool:
    """Return whether a probe finds it ready; if not, writes must be the reason."""
    answer = service.http.get("/health/ready")
    if answer.status_code == httpx.codes.OK:
        return True
    assert answer.json()["parts"]["writes"] == "down", answer.text
    return False


def complaints(service: Service) -> int:
    """Count the log lines of the API about refused sessions or missing space."""
    return len(
        re.findall(
            r"^rooms: serve: .*PostgreSQL (?:is away|takes no work)",
            service.output.read_text(),
            re.MULTILINE,
        )
    )


def test_a_full_file_system_refuses_publishes_and_loses_nothing(
    service: Service, sink: Sink
) -> None:
    """Answer 503 with Retry-After until there is space again, then 202, without intervention, also where processes were killed meanwhile.

    Every message is there once in the end: those that were answered 202, and those that were refused and sent again.
    """
    # It fails until the test ends the fault, however long that takes.
    place = Place.open(
        service, sink, delivery_delay_ms=300, delivery_delay_multiplier=1, delivery_attempts=1000
    )
    hook, queue, publisher = place.push(), place.queue(), Publisher(place)
    sink.script(hook.path, then=500)
    assert all(publisher.publish(10) for _ in range(5))
    sink.wait(hook.path)
    before = {name: service.pid(name) for name in OURS}
    with filled(service.data):
        until(lambda: not publisher.publish(BIG), "a publish to be refused")
        for _ in range(10):
            publisher.publish(BIG)
        assert live(service)
        until(lambda: not ready(service), "readiness to say so", within_s=20)
        assert {name: service.pid(name) for name in OURS} == before, service.reported()
        for name in OURS:
            service.kill(name)
        before_kills = complaints(service)
        # Whether PostgreSQL takes a new session is a matter of luck; without one the API waits for it before it listens.
        until(
            lambda: live(service) or complaints(service) > before_kills,
            "the API to be started again",
        )
        if service.pid("postgres"):  # unless it has given up already
            service.kill("postgres")
    service.await_ready()
    assert "SIGBUS" not in service.output.read_text()
    sink.script(hook.path)
    publisher.again()
    messages = place.pull_all(queue, len(publisher.payloads))
    assert sorted(message["payload"] for message in messages) == sorted(publisher.payloads.values())
    assert place.pull(queue) == []
    until(lambda: not service.rows(UNDELIVERED, hook.id), "everything to be delivered")
    assert {arrival.body for arrival in sink.arrivals(hook.path)} == {
        f'"{payload}"'.encode() for payload in publisher.payloads.values()
    }


def test_readiness_sees_a_full_file_system_though_nothing_is_published(service: Service) -> None:
    """PostgreSQL answers reads all the while; a proxy must not send publishes here, and must come back by itself."""
    service.await_ready()
    with filled(service.data):
        until(lambda: not ready(service), "readiness to say so")
        assert service.http.get("/health/ready").json()["parts"]["database"] == "up"
    until(lambda: ready(service), "readiness to come back")
