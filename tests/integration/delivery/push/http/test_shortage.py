"""Test that what this process or machine lacks is no failure of an endpoint."""

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_network
from typing import Any

import pytest
import uvloop

from delivery.push.errors import ResourceShortageError
from delivery.push.http.client import HttpSender
from delivery.push.http.ssrf import SsrfGuard
from rooms.domain.attempt import AttemptResult, ErrorClass
from rooms.domain.ids import OrganisationId
from rooms.domain.push_url import PushUrl
from tests.support.scripted_endpoints import OK, answering, serving

LOOPBACK = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
ORGANISATION = OrganisationId("01900000-0000-7000-8000-000000000001")


@contextmanager
def no_files() -> Iterator[None]:
    """Let the process open no file more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class FailingResolver:
    """Contact no name server."""

    async def __call__(self, host: str) -> list[str]:
        raise OSError("Could not contact DNS servers")

    def close(self) -> None:
        """Have nothing open."""


class AnsweringResolver:
    """Have these answers, and then none."""

    def __init__(self, answers: list[list[str]]) -> None:
        self.answers = answers

    async def __call__(self, host: str) -> list[str]:
        if not self.answers:
            raise OSError("Could not contact DNS servers")
        return self.answers.pop(0)

    def close(self) -> None:
        """Have nothing open."""


class FilelessResolver:
    """Have no file for the first look-up, as c-ares reports it, or with the system's error."""

    def __init__(self, outcome: OSError | list[str]) -> None:
        self.outcome = outcome
        self.lookups = 0

    async def __call__(self, host: str) -> list[str]:
        self.lookups += 1
        if self.lookups > 1:
            return ["127.0.0.1"]
        if isinstance(self.outcome, OSError):
            raise self.outcome
        return self.outcome

    def close(self) -> None:
        """Have nothing open."""


async def post(sender: HttpSender, host: str, port: int) -> AttemptResult:
    target = PushUrl(scheme="http", host=host, port=port, path="/")
    return await sender.send(target, b"", b"", organisation=ORGANISATION, timeout_s=10)


async def attempts(causes: list[str]) -> AttemptResult:
    async with (
        serving(answering(OK)) as endpoint,
        HttpSender(SsrfGuard(LOOPBACK), on_shortage=causes.append) as sender,
    ):
        for _ in range(2):
            with no_files(), pytest.raises(ResourceShortageError, match="ulimit"):
                await post(sender, "127.0.0.1", endpoint.port)
        assert sender.connections == 0
        return await post(sender, "127.0.0.1", endpoint.port)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_without_files_no_attempt_is_made(
    new_loop: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    causes: list[str] = []
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(attempts(causes)).status == 200
    assert causes == ["EMFILE", "EMFILE"]
    away, back = caplog.messages
    assert away.startswith("Room for connections to webhooks is away: Too many open files")
    assert "2 webhooks were put off meanwhile" in back


async def test_a_name_that_cannot_be_looked_up_without_files_is_no_failure_of_dns() -> None:
    async with HttpSender(SsrfGuard(LOOPBACK, resolver=FailingResolver())) as sender:
        with no_files(), pytest.raises(ResourceShortageError):
            await post(sender, "hooks.example", 80)
        assert (await post(sender, "hooks.example", 80)).error is ErrorClass.DNS


@pytest.mark.parametrize(
    "outcome",
    [OSError("Could not contact DNS servers"), []],
    ids=["no name server", "no address"],
)
async def test_after_a_shortage_a_name_is_looked_up_again(outcome: OSError | list[str]) -> None:
    """A cached refusal would count as a failure of the endpoint when there are files again."""
    causes: list[str] = []
    resolver = FilelessResolver(outcome)
    async with (
        serving(answering(OK)) as endpoint,
        HttpSender(SsrfGuard(LOOPBACK, resolver=resolver), on_shortage=causes.append) as sender,
    ):
        with no_files(), pytest.raises(ResourceShortageError, match="ulimit"):
            await post(sender, "hooks.example", endpoint.port)
        assert (await post(sender, "hooks.example", endpoint.port)).status == 200
    assert resolver.lookups == 2
    assert causes == ["EMFILE"]


async def test_a_shortage_that_ended_after_the_lookup_is_known_by_its_error() -> None:
    resolver = FilelessResolver(OSError(errno.EMFILE, "Too many open files"))
    async with (
        serving(answering(OK)) as endpoint,
        HttpSender(SsrfGuard(LOOPBACK, resolver=resolver)) as sender,
    ):
        with pytest.raises(ResourceShortageError, match="ulimit"):
            await post(sender, "hooks.example", endpoint.port)
        assert (await post(sender, "hooks.example", endpoint.port)).status == 200


async def test_a_name_that_was_refused_before_a_shortage_stays_refused() -> None:
    async with HttpSender(SsrfGuard(LOOPBACK, resolver=FailingResolver())) as sender:
        assert (await post(sender, "hooks.example", 80)).error is ErrorClass.DNS
        with no_files():
            assert (await post(sender, "hooks.example", 80)).error is ErrorClass.DNS


async def test_a_shortage_leaves_addresses_that_are_still_usable() -> None:
    now_s = 0.0
    resolver = AnsweringResolver([["127.0.0.1"]])
    guard = SsrfGuard(LOOPBACK, resolver=resolver, clock=lambda: now_s)
    assert await guard.resolve("hooks.example", 80, ORGANISATION) == ("127.0.0.1",)
    now_s = 6.0
    with no_files():
        assert await guard.resolve("hooks.example", 80, ORGANISATION) == ("127.0.0.1",)


@pytest.mark.parametrize("code", [errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_a_machine_without_files_or_memory_makes_no_attempt(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, "lacking")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refuse)
    async with HttpSender(SsrfGuard(LOOPBACK)) as sender:
        with pytest.raises(ResourceShortageError, match="lacking"):
            await post(sender, "127.0.0.1", 8000)


async def test_without_a_free_port_no_attempt_is_made_and_without_a_route_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refuse)
    async with HttpSender(SsrfGuard(LOOPBACK)) as sender:
        with pytest.raises(ResourceShortageError, match="ip_local_port_range"):
            await post(sender, "127.0.0.1", 8000)

        def no_route(_socket: socket.socket, _address: object) -> None:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

        class Unrouted(socket.socket):
            connect = no_route

        monkeypatch.setattr(socket, "socket", Unrouted)
        assert (await post(sender, "127.0.0.1", 8000)).error is ErrorClass.CONNECT
