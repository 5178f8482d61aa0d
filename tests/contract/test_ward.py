"""A ward as a real process: it answers as the sender would, and what becomes of attempts when it dies or hangs."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from ipaddress import ip_network

import pytest

from delivery.errors import AttemptCrashedError, WardUnavailableError
from delivery.isolation.ward import Ward
from delivery.target_policy import TargetPolicy
from rooms.domain.attempt import ErrorClass
from rooms.domain.ids import OrganisationId
from rooms.domain.target import Target
from tests.contract.endpoints import deaf_port
from tests.service import descendants
from tests.sink import HANG, Reply, Sink, sinking

ORGANISATION = OrganisationId("01900000-0000-7000-8000-000000000001")
HEADERS = b"webhook-id: 1\r\nRooms-Delivery-Attempt: 0\r\nRooms-Delivery-Delay: 0\r\n"
BODY = bytes(range(256)) * 400


@pytest.fixture(scope="module")
def sink() -> Iterator[Sink]:
    with sinking() as sink:
        yield sink


@pytest.fixture
async def ward() -> AsyncIterator[Ward]:
    ward = Ward(TargetPolicy(allow=(ip_network("127.0.0.0/8"),)), grace_s=5)
    yield ward
    await ward.close()
    assert (ward.pid, ward._readings) == (None, set())


def at(sink: Sink, path: str) -> Target:
    return Target.parse(sink.url(path))


def process(ward: Ward) -> int:
    assert ward.pid is not None
    return ward.pid


async def test_it_answers_as_the_sender_would(sink: Sink, ward: Ward) -> None:
    """Many at a time, through one process."""
    sink.behave("/busy", lambda _: Reply(status=503, headers={"Retry-After": "7"}, body=b"no \xff"))
    with deaf_port() as port:
        fine, busy, closed, refused = await asyncio.gather(
            ward.send(at(sink, "/fine?a=%20b"), HEADERS, BODY, organisation=ORGANISATION, timeout_s=20),
            ward.send(at(sink, "/busy"), HEADERS, b"", organisation=ORGANISATION, timeout_s=20),
            ward.send(Target.parse(f"http://127.0.0.1:{port}/"), HEADERS, b"", organisation=ORGANISATION, timeout_s=20),
            ward.send(Target.parse("http://127.0.0.1:6379/"), HEADERS, b"", organisation=ORGANISATION, timeout_s=20),
        )
    assert (fine.status, fine.error, fine.body_head) == (204, None, b"")
    assert (busy.status, busy.error, busy.retry_after, busy.body_head) == (503, ErrorClass.STATUS, "7", b"no \xff")
    assert (closed.status, closed.error) == (None, ErrorClass.CONNECT)
    assert (refused.status, refused.error) == (None, ErrorClass.BLOCKED)
    (arrival,) = sink.arrivals("/fine?a=%20b")
    assert (arrival.body, arrival.webhook_id) == (BODY, "1")
    assert len(descendants(process(ward))) == 1


async def test_it_may_reach_what_its_worker_may() -> None:
    ward = Ward(TargetPolicy())
    try:
        answer = await ward.send(
            Target.parse("http://127.0.0.1:8080/"), HEADERS, b"", organisation=ORGANISATION, timeout_s=20
        )
    finally:
        await ward.close()
    assert answer.error is ErrorClass.BLOCKED


async def test_what_it_had_when_it_died_crashed_and_the_next_gets_another(sink: Sink, ward: Ward) -> None:
    sink.behave("/hangs", lambda _: HANG)
    sending = [
        asyncio.create_task(ward.send(at(sink, "/hangs"), HEADERS, b"", organisation=ORGANISATION, timeout_s=60))
        for _ in range(3)
    ]
    await asyncio.to_thread(sink.wait, "/hangs", 3)
    dead = process(ward)
    os.kill(dead, signal.SIGKILL)
    for one in sending:
        with pytest.raises(AttemptCrashedError, match="SIGKILL"):
            await one
    assert (await ward.send(at(sink, "/fine"), HEADERS, b"", organisation=ORGANISATION, timeout_s=20)).status == 204
    assert process(ward) != dead


async def test_a_process_that_hangs_is_killed(sink: Sink, ward: Ward) -> None:
    """An endpoint that hangs is an answer; a process that does not give it is no process."""
    sink.behave("/silent", lambda _: HANG)
    answer = await ward.send(at(sink, "/silent"), HEADERS, b"", organisation=ORGANISATION, timeout_s=0.1)
    assert answer.error is ErrorClass.TIMEOUT
    os.kill(process(ward), signal.SIGSTOP)
    with pytest.raises(AttemptCrashedError, match="hung"):
        await ward.send(at(sink, "/fine"), HEADERS, b"", organisation=ORGANISATION, timeout_s=0.1)
    assert (await ward.send(at(sink, "/fine"), HEADERS, b"", organisation=ORGANISATION, timeout_s=20)).status == 204


async def test_what_is_meant_for_the_worker_does_not_end_it(sink: Sink, ward: Ward) -> None:
    """A terminal or a service manager tells all of them; it is the worker that lets attempts end."""
    assert (await ward.send(at(sink, "/fine"), HEADERS, b"", organisation=ORGANISATION, timeout_s=20)).status == 204
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(process(ward), number)
    before = process(ward)
    assert (await ward.send(at(sink, "/fine"), HEADERS, b"", organisation=ORGANISATION, timeout_s=20)).status == 204
    assert process(ward) == before


async def test_where_no_process_comes_up_nothing_was_attempted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delivery.isolation.ward.sys.executable", "/nonexistent/python")
    with pytest.raises(WardUnavailableError):
        await Ward(TargetPolicy()).send(
            Target.parse("http://127.0.0.1:8080/"), HEADERS, b"", organisation=ORGANISATION, timeout_s=1
        )
    monkeypatch.setattr("delivery.isolation.ward.sys.executable", "/bin/false")
    with pytest.raises(WardUnavailableError):
        await Ward(TargetPolicy()).send(
            Target.parse("http://127.0.0.1:8080/"), HEADERS, b"", organisation=ORGANISATION, timeout_s=1
        )
