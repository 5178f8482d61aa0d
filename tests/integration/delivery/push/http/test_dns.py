"""Test the resolvers against a real name server on loopback, under uvloop as in the service."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from ipaddress import ip_network
from typing import Any

import pycares
import pytest
import uvloop

from delivery.push.http.client import HttpSender
from delivery.push.http.dns import DnsResolver, SystemResolver
from delivery.push.http.ssrf import SsrfGuard
from rooms.domain.ids import OrganisationId
from rooms.domain.push_url import PushUrl
from tests.support.name_server import NAME_ERROR, SERVER_FAILURE, SILENT, naming
from tests.support.scripted_endpoints import BOUND_S, OK, answering, serving

HOSTILE = OrganisationId("01900000-0000-7000-8000-000000000001")
HEALTHY = OrganisationId("01900000-0000-7000-8000-000000000002")


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S):
            await scenario()

    uvloop.run(bounded())


def behave(name: str) -> Sequence[str] | int | None:
    if name.startswith("silent"):
        return SILENT
    if name.startswith("absent"):
        return NAME_ERROR
    if name.startswith("failing"):
        return SERVER_FAILURE
    return () if name.startswith("empty") else ("127.0.0.1",)


def test_names_with_and_without_addresses() -> None:
    async def scenario() -> None:
        async with naming(behave) as server:
            resolver = DnsResolver(servers=[server.address])
            try:
                assert await resolver("well.example") == ("127.0.0.1",)
                assert await resolver("under_score.example") == ("127.0.0.1",)
                assert await resolver("absent.example") == ()
                assert await resolver("empty.example") == ()
                assert await resolver("x" * 64 + ".example") == ()
                with pytest.raises(OSError, match="general failure"):
                    await resolver("failing.example")
                assert set(await resolver("localhost")) <= {"127.0.0.1", "::1"}
                assert "localhost" not in server.asked
            finally:
                resolver.close()

    run(scenario)


def test_silent_names_delay_no_other_lookup() -> None:
    """Check that silent names delay no other: uvloop's own getaddrinfo has only two threads."""

    async def scenario() -> None:
        async with naming(behave) as server, serving(answering(OK)) as endpoint:
            resolver = DnsResolver(servers=[server.address])
            guard = SsrfGuard([ip_network("127.0.0.0/8")], resolver=resolver)
            async with HttpSender(guard) as sender:

                async def post(host: str, organisation: OrganisationId) -> int | None:
                    target = PushUrl.parse(f"http://{host}:{endpoint.port}/")
                    answer = await sender.send(
                        target, b"", b"{}", organisation=organisation, timeout_s=BOUND_S
                    )
                    return answer.status

                stuck = [
                    asyncio.create_task(post(f"silent-{number}.example", HOSTILE))
                    for number in range(200)
                ]
                while len({name for name in server.asked if name.startswith("silent")}) < 32:
                    server.came.clear()
                    await server.came.wait()
                for number in range(50):
                    assert await post(f"well-{number}.example", HEALTHY) == 200
                # The loop's own threads are idle, so PostgreSQL's name can be resolved.
                await asyncio.get_running_loop().getaddrinfo(
                    "127.0.0.1", 80, flags=socket.AI_NUMERICHOST
                )
                for task in stuck:
                    task.cancel()
                await asyncio.gather(*stuck, return_exceptions=True)
            resolver.close()

    run(scenario)


def test_every_lookup_ends() -> None:
    async def scenario() -> None:
        async with naming(behave) as server:
            resolver = DnsResolver(servers=[server.address], first_try_s=0.05, cache_s=0.02)
            await resolver("well.example")
            with pytest.raises(OSError, match="Timeout"):
                await resolver("silent.example")
            # Flushing the cache meanwhile had no effect.
            assert await resolver("well.example") == ("127.0.0.1",)
            resolver.close()

    run(scenario)


def test_the_ttl_of_a_zone_does_not_extend_the_cache() -> None:
    """Check that results of c-ares expire soon: its own cache has no bound."""

    async def scenario() -> None:
        addresses = ["127.0.0.1"]
        async with naming(lambda _: addresses) as server:
            resolver = DnsResolver(servers=[server.address], cache_s=0.02)
            assert await resolver("moving.example") == ("127.0.0.1",)
            addresses[:] = ["127.0.0.2"]
            while await resolver("moving.example") == ("127.0.0.1",):  # noqa: ASYNC110 - a cache sends no signal
                await asyncio.sleep(0.01)
            assert await resolver("moving.example") == ("127.0.0.2",)
            resolver.close()
            resolver.close()

    run(scenario)


def test_many_addresses_of_both_families() -> None:
    async def scenario() -> None:
        found = ["127.0.0.2", "127.0.0.3", "::1"]
        async with naming(lambda _: found) as server:
            resolver = DnsResolver(servers=[server.address])
            assert set(await resolver("many.example")) == set(found)
            resolver.close()

    run(scenario)


async def test_the_system_resolver_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[str]()

    def getaddrinfo(host: str) -> list[Any]:
        threads.append(threading.current_thread().name)
        if host == "absent.example":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if host == "failing.example":
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [
            (0, 0, 0, "", (address, 0)) for address in ("127.0.0.1", "127.0.0.1", "fe80::1%eth0")
        ]

    monkeypatch.setattr("delivery.push.http.dns._getaddrinfo", getaddrinfo)
    resolver = SystemResolver(threads=2)
    assert await resolver("well.example") == ("127.0.0.1", "fe80::1%eth0")
    assert await resolver("absent.example") == ()
    with pytest.raises(OSError, match="Temporary"):
        await resolver("failing.example")
    assert all(name.startswith("rooms-names") for name in threads)
    resolver.close()


async def test_without_c_ares_the_system_resolver_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Simulate a system without a free inotify instance."""

    def channel(**_options: object) -> None:
        raise pycares.AresError("Failed to initialize c-ares channel")

    monkeypatch.setattr("delivery.push.http.dns.pycares.Channel", channel)
    resolver = DnsResolver()
    for _ in range(2):
        assert set(await resolver("localhost")) <= {"127.0.0.1", "::1"}
    assert caplog.text.count("c-ares cannot be used") == 1
    resolver.close()


async def test_the_system_resolver_reads_the_hosts_file() -> None:
    resolver = SystemResolver(threads=1)
    assert set(await resolver("localhost")) <= {"127.0.0.1", "::1"}
    resolver.close()
