"""Test a sandbox as a real process: its results, and its attempts when it dies or hangs."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from ipaddress import ip_network
from pathlib import Path

import pytest
import uvloop

from delivery.push.errors import AttemptCrashedError, ClaimExpiredError, SandboxUnavailableError
from delivery.push.http.ssrf import TargetPolicy
from delivery.push.sandbox.process import SandboxProcess
from rooms.domain.attempt import AttemptResult, ErrorClass
from rooms.domain.ids import OrganisationId
from rooms.domain.push_url import PushUrl
from tests.support.scripted_endpoints import deaf_port
from tests.support.service import ROOT, descendants
from tests.support.webhook_sink import HANG, Reply, Sink, sinking

ORGANISATION = OrganisationId("01900000-0000-7000-8000-000000000001")
HEADERS = b"webhook-id: 1\r\nRooms-Delivery-Attempt: 0\r\nRooms-Delivery-Delay: 0\r\n"
BODY = bytes(range(256)) * 400
FAILING_SENDER = """
from delivery.push.http.client import HttpSender
async def fail(*args, **kwargs):
    1 / 0
HttpSender.send = fail
"""


@pytest.fixture(scope="module")
def sink() -> Iterator[Sink]:
    with sinking() as sink:
        yield sink


@pytest.fixture
async def sandbox() -> AsyncIterator[SandboxProcess]:
    sandbox = SandboxProcess(TargetPolicy(allow=(ip_network("127.0.0.0/8"),)), grace_s=5)
    yield sandbox
    await sandbox.close()
    assert (sandbox.pid, sandbox._reader_tasks) == (None, set())


def at(sink: Sink, path: str) -> PushUrl:
    return PushUrl.parse(sink.url(path))


def process(sandbox: SandboxProcess) -> int:
    assert sandbox.pid is not None
    return sandbox.pid


async def test_a_sandbox_returns_the_results_of_the_sender(
    sink: Sink, sandbox: SandboxProcess
) -> None:
    """Make many attempts at a time in one process."""
    sink.behave("/busy", lambda _: Reply(status=503, headers={"Retry-After": "7"}, body=b"no \xff"))
    with deaf_port() as port:
        fine, busy, closed, refused = await asyncio.gather(
            sandbox.send(
                at(sink, "/fine?a=%20b"), HEADERS, BODY, organisation=ORGANISATION, timeout_s=20
            ),
            sandbox.send(at(sink, "/busy"), HEADERS, b"", organisation=ORGANISATION, timeout_s=20),
            sandbox.send(
                PushUrl.parse(f"http://127.0.0.1:{port}/"),
                HEADERS,
                b"",
                organisation=ORGANISATION,
                timeout_s=20,
            ),
            sandbox.send(
                PushUrl.parse("http://127.0.0.1:6379/"),
                HEADERS,
                b"",
                organisation=ORGANISATION,
                timeout_s=20,
            ),
        )
    assert (fine.status, fine.error, fine.body_head) == (204, None, b"")
    assert (busy.status, busy.error, busy.retry_after, busy.body_head) == (
        503,
        ErrorClass.STATUS,
        "7",
        b"no \xff",
    )
    assert (closed.status, closed.error) == (None, ErrorClass.CONNECT)
    assert (refused.status, refused.error) == (None, ErrorClass.BLOCKED)
    (arrival,) = sink.arrivals("/fine?a=%20b")
    assert (arrival.body, arrival.webhook_id) == (BODY, "1")
    assert len(descendants(process(sandbox))) == 1


async def test_a_sandbox_has_the_target_policy_of_its_worker() -> None:
    sandbox = SandboxProcess(TargetPolicy())
    try:
        answer = await sandbox.send(
            PushUrl.parse("http://127.0.0.1:8080/"),
            HEADERS,
            b"",
            organisation=ORGANISATION,
            timeout_s=20,
        )
    finally:
        await sandbox.close()
    assert answer.error is ErrorClass.BLOCKED


async def test_attempts_of_a_dead_process_crash_and_the_next_gets_a_new_one(
    sink: Sink, sandbox: SandboxProcess
) -> None:
    sink.behave("/hangs", lambda _: HANG)
    sending = [
        asyncio.create_task(
            sandbox.send(at(sink, "/hangs"), HEADERS, b"", organisation=ORGANISATION, timeout_s=60)
        )
        for _ in range(3)
    ]
    await asyncio.to_thread(sink.wait, "/hangs", 3)
    dead = process(sandbox)
    os.kill(dead, signal.SIGKILL)
    for one in sending:
        with pytest.raises(AttemptCrashedError, match="SIGKILL"):
            await one
    assert (
        await sandbox.send(at(sink, "/fine"), HEADERS, b"", organisation=ORGANISATION, timeout_s=20)
    ).status == 204
    assert process(sandbox) != dead


@pytest.mark.parametrize("create_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_process_that_no_longer_reads_gets_no_attempt(
    sink: Sink, create_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """The pipe to a process that dies is closed before its end is noticed."""

    async def send_twice() -> None:
        sandbox = SandboxProcess(TargetPolicy(allow=(ip_network("127.0.0.0/8"),)))
        try:
            for _ in range(2):
                answer = await sandbox.send(
                    at(sink, "/fine"), HEADERS, b"", organisation=ORGANISATION, timeout_s=20
                )
                assert answer.status == 204
                child = sandbox._child
                assert child is not None
                child._stdin.transport.abort()
                await asyncio.sleep(0)
                assert not child.closed
        finally:
            await sandbox.close()

    with asyncio.Runner(loop_factory=create_loop) as runner:
        runner.run(send_twice())


async def test_a_process_that_hangs_is_killed(sink: Sink, sandbox: SandboxProcess) -> None:
    """Expect a result for an endpoint that hangs, and a crash for a process that hangs."""
    sink.behave("/silent", lambda _: HANG)
    answer = await sandbox.send(
        at(sink, "/silent"), HEADERS, b"", organisation=ORGANISATION, timeout_s=0.1
    )
    assert answer.error is ErrorClass.TIMEOUT
    os.kill(process(sandbox), signal.SIGSTOP)
    with pytest.raises(AttemptCrashedError, match="hung"):
        await sandbox.send(
            at(sink, "/fine"), HEADERS, b"", organisation=ORGANISATION, timeout_s=0.1
        )
    assert (
        await sandbox.send(at(sink, "/fine"), HEADERS, b"", organisation=ORGANISATION, timeout_s=20)
    ).status == 204


async def test_signals_to_the_worker_do_not_end_a_sandbox(
    sink: Sink, sandbox: SandboxProcess
) -> None:
    """Send the signals that a terminal or service manager sends to all processes."""
    assert (
        await sandbox.send(at(sink, "/fine"), HEADERS, b"", organisation=ORGANISATION, timeout_s=20)
    ).status == 204
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(process(sandbox), number)
    before = process(sandbox)
    assert (
        await sandbox.send(at(sink, "/fine"), HEADERS, b"", organisation=ORGANISATION, timeout_s=20)
    ).status == 204
    assert process(sandbox) == before


async def test_an_error_of_the_sender_is_a_failed_attempt_and_no_crash(
    sink: Sink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a result it would seem to hang, and all attempts beside it would end with it."""
    (tmp_path / "sitecustomize.py").write_text(FAILING_SENDER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    sandbox = SandboxProcess(TargetPolicy(allow=(ip_network("127.0.0.0/8"),)))
    try:
        answer = await sandbox.send(
            at(sink, "/fine"), HEADERS, b"", organisation=ORGANISATION, timeout_s=20
        )
    finally:
        await sandbox.close()
    assert (answer.status, answer.error) == (None, ErrorClass.PROTOCOL)
    assert answer.detail == "the sender failed: ZeroDivisionError"


async def test_nothing_is_attempted_if_the_claim_ends_before_the_process_is_ready(
    sink: Sink,
) -> None:
    """A start takes most of a second, and may take a minute."""
    late = False
    sandbox = SandboxProcess(
        TargetPolicy(allow=(ip_network("127.0.0.0/8"),)), monotonic=lambda: 2.0 if late else 1.0
    )

    async def send(start_before: float) -> AttemptResult:
        return await sandbox.send(
            at(sink, "/late"),
            HEADERS,
            b"",
            organisation=ORGANISATION,
            timeout_s=20,
            start_before=start_before,
        )

    try:
        with pytest.raises(ClaimExpiredError):
            await send(1.0)
        assert sandbox.pid is None, "no process is started for it"
        sending = asyncio.create_task(send(2.0))
        await asyncio.sleep(0)
        late = True
        with pytest.raises(ClaimExpiredError):
            await sending
        child = sandbox._child
        assert child is not None
        assert child.idle_timer is not None
        assert (await send(3.0)).status == 204
        assert sandbox._child is child
    finally:
        await sandbox.close()
    assert len(sink.arrivals("/late")) == 1


async def test_without_a_ready_process_nothing_is_attempted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("delivery.push.sandbox.process.sys.executable", "/nonexistent/python")
    with pytest.raises(SandboxUnavailableError):
        await SandboxProcess(TargetPolicy()).send(
            PushUrl.parse("http://127.0.0.1:8080/"),
            HEADERS,
            b"",
            organisation=ORGANISATION,
            timeout_s=1,
        )
    monkeypatch.setattr("delivery.push.sandbox.process.sys.executable", "/bin/false")
    with pytest.raises(SandboxUnavailableError):
        await SandboxProcess(TargetPolicy()).send(
            PushUrl.parse("http://127.0.0.1:8080/"),
            HEADERS,
            b"",
            organisation=ORGANISATION,
            timeout_s=1,
        )
