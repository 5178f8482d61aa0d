"""Test the SSRF guard with silent or wrong name servers, many names, and refused ports."""

import asyncio
from collections.abc import Sequence
from ipaddress import ip_network

import pytest

from delivery.push.errors import BlockedError, UnresolvableError
from delivery.push.http.dns import LookupLimits, Resolver
from delivery.push.http.ssrf import SsrfGuard
from rooms.domain.ids import OrganisationId
from rooms.domain.push_url import REFUSED_PORTS, PushUrl

ORGANISATION = OrganisationId("01900000-0000-7000-8000-000000000001")
OTHER = OrganisationId("01900000-0000-7000-8000-000000000002")
LOOPBACK = (ip_network("127.0.0.0/8"), ip_network("::1/128"))


def answering(*addresses: str) -> Resolver:
    async def resolver(host: str) -> Sequence[str]:
        return addresses

    return resolver


async def unreachable(host: str) -> Sequence[str]:
    raise AssertionError(f"{host} needs no look-up")


class Scripted:
    """Return addresses, raise an error, or stay silent until `speak`, as set."""

    def __init__(self, does: Sequence[str] | Exception | None) -> None:
        self.does = does
        self.asked: list[str] = []
        self.speak = asyncio.Event()

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        if self.does is None:
            await self.speak.wait()
        if isinstance(self.does, Exception):
            raise self.does
        return self.does or ()


class Clock:
    """Return the seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def seen(guard_: SsrfGuard, host: str = "a.example") -> tuple[str, ...] | None:
    return guard_.cached(host, ORGANISATION)


async def test_without_an_answer_the_old_addresses_are_used() -> None:
    resolver, clock, outcomes = Scripted(["1.1.1.1"]), Clock(), list[str]()
    guard = SsrfGuard(resolver=resolver, clock=clock, refresh_wait_s=0.01, observe=outcomes.append)
    await guard.resolve("a.example", 80, ORGANISATION)
    clock.now += 5
    resolver.does = None
    assert seen(guard) is None
    assert await guard.resolve("a.example", 80, ORGANISATION) == ("1.1.1.1",)
    # No attempt waits for that lookup any more, and there is only one.
    assert seen(guard) == ("1.1.1.1",)
    assert resolver.asked == ["a.example"] * 2
    resolver.does = ["2.2.2.2"]
    resolver.speak.set()
    await asyncio.gather(*guard._pending.values())
    assert seen(guard) == ("2.2.2.2",)
    assert outcomes == ["answered", "stale", "answered"]


async def test_old_addresses_expire() -> None:
    resolver, clock = Scripted(["1.1.1.1"]), Clock()
    guard = SsrfGuard(resolver=resolver, clock=clock, stale_s=300)
    await guard.resolve("a.example", 80, ORGANISATION)
    began = clock.now
    resolver.does = OSError("SERVFAIL")
    while clock.now < began + 299:
        assert await guard.resolve("a.example", 80, ORGANISATION) == ("1.1.1.1",)
        clock.now += 1
    clock.now = began + 300
    assert seen(guard) is None
    with pytest.raises(UnresolvableError, match="SERVFAIL"):
        await guard.resolve("a.example", 80, ORGANISATION)
    # At 5, 10, 20, 40, then every 30 seconds, and at the end.
    assert len(resolver.asked) == 1 + 3 + 9 + 1


@pytest.mark.parametrize(
    "later", [["10.0.0.1"], ["127.0.0.1", "::1"], ["fe80::1%eth0"], ["::ffff:1.1.1.1"], []]
)
async def test_an_answer_without_allowed_addresses_counts_at_once(later: list[str]) -> None:
    resolver, clock = Scripted(["1.1.1.1"]), Clock()
    guard = SsrfGuard(resolver=resolver, clock=clock)
    await guard.resolve("a.example", 80, ORGANISATION)
    clock.now += 5
    resolver.does = later
    with pytest.raises(BlockedError if later else UnresolvableError):
        await guard.resolve("a.example", 80, ORGANISATION)
    resolver.does = OSError("SERVFAIL")
    clock.now += 5
    with pytest.raises(UnresolvableError):
        await guard.resolve("a.example", 80, ORGANISATION)


async def test_a_late_refusal_replaces_the_old_addresses() -> None:
    resolver, clock = Scripted(["1.1.1.1"]), Clock()
    guard = SsrfGuard(resolver=resolver, clock=clock, refresh_wait_s=0.01)
    await guard.resolve("a.example", 80, ORGANISATION)
    clock.now += 5
    resolver.does = None
    assert await guard.resolve("a.example", 80, ORGANISATION) == ("1.1.1.1",)
    resolver.does = ["169.254.169.254"]
    resolver.speak.set()
    await asyncio.gather(*guard._pending.values())
    assert seen(guard) is None
    with pytest.raises(BlockedError):
        await guard.resolve("a.example", 80, ORGANISATION)


@pytest.mark.parametrize("does", [OSError("SERVFAIL"), ["10.0.0.1"], []])
async def test_failed_lookups_are_repeated_less_and_less_often(
    does: Sequence[str] | Exception,
) -> None:
    resolver, clock = Scripted(does), Clock()
    guard = SsrfGuard(resolver=resolver, clock=clock, fresh_s=5, backoff_s=30)
    asked_at = []
    for second in range(100):
        clock.now = 1000.0 + second
        before = len(resolver.asked)
        with pytest.raises((BlockedError, UnresolvableError)):
            await guard.resolve("a.example", 80, ORGANISATION)
        if len(resolver.asked) > before:
            asked_at.append(second)
    assert asked_at == [0, 5, 15, 35, 65, 95]
    clock.now += 30
    resolver.does = ["1.1.1.1"]
    assert await guard.resolve("a.example", 80, ORGANISATION) == ("1.1.1.1",)
    clock.now += 5
    resolver.does = OSError("SERVFAIL")
    await guard.resolve("a.example", 80, ORGANISATION)
    clock.now += 5
    await guard.resolve("a.example", 80, ORGANISATION)
    assert len(resolver.asked) == 9


async def test_a_lookup_has_a_deadline() -> None:
    resolver, outcomes = Scripted(None), list[str]()
    guard = SsrfGuard(
        resolver=resolver, limits=LookupLimits(deadline_s=0.01), observe=outcomes.append
    )
    with pytest.raises(UnresolvableError, match="no answer in time"):
        await guard.resolve("a.example", 80, ORGANISATION)
    assert outcomes == ["failed"]
    assert guard.active_organisations == 0


async def test_an_organisation_with_silent_names_delays_no_other() -> None:
    """Check that silent names take no thread that others, or PostgreSQL's reconnects, need."""
    silent, full, waits = asyncio.Event(), asyncio.Event(), list[str]()

    def waited(bound: str) -> None:
        waits.append(bound)
        if len(waits) == 96:
            full.set()

    async def resolver(host: str) -> Sequence[str]:
        if host.startswith("silent"):
            await silent.wait()
        return ("1.1.1.1",)

    limits = LookupLimits(total=8, per_organisation=4, deadline_s=60, wait_s=60)
    guard = SsrfGuard(resolver=resolver, limits=limits, on_wait=waited)
    names = [f"silent-{number}.example" for number in range(100)]
    stuck = [asyncio.create_task(guard.resolve(name, 80, ORGANISATION)) for name in names]
    await full.wait()
    for number in range(100):
        assert await guard.resolve(f"well-{number}.example", 80, OTHER) == ("1.1.1.1",)
    # The same name makes no difference: each organisation has a queue of its own.
    other = asyncio.create_task(guard.resolve(names[99], 80, OTHER))
    await asyncio.sleep(0)
    silent.set()
    assert await asyncio.gather(other, *stuck) == [("1.1.1.1",)] * 101
    assert set(waits) == {"organisation"}
    assert guard.active_organisations == 0


async def test_a_name_that_gets_no_slot_is_not_cached() -> None:
    resolver, outcomes = Scripted(None), list[str]()
    limits = LookupLimits(per_organisation=1, deadline_s=60, wait_s=0.01)
    guard = SsrfGuard(resolver=resolver, limits=limits, observe=outcomes.append)
    first = asyncio.create_task(guard.resolve("a.example", 80, ORGANISATION))
    await asyncio.sleep(0)
    with pytest.raises(UnresolvableError, match="too many names"):
        await guard.resolve("b.example", 80, ORGANISATION)
    resolver.does = ["1.1.1.1"]
    resolver.speak.set()
    await first
    assert await guard.resolve("b.example", 80, ORGANISATION) == ("1.1.1.1",)
    assert outcomes == ["busy", "answered", "answered"]


async def test_a_cached_name_that_gets_no_slot_stays_usable() -> None:
    resolver, clock = Scripted(["1.1.1.1"]), Clock()
    limits = LookupLimits(per_organisation=1, deadline_s=60, wait_s=0.01)
    guard = SsrfGuard(resolver=resolver, clock=clock, limits=limits)
    await guard.resolve("b.example", 80, ORGANISATION)
    resolver.does = None
    first = asyncio.create_task(guard.resolve("a.example", 80, ORGANISATION))
    await asyncio.sleep(0)
    clock.now += 5
    assert await guard.resolve("b.example", 80, ORGANISATION) == ("1.1.1.1",)
    first.cancel()
    resolver.speak.set()


async def test_any_error_of_a_resolver_concerns_one_name_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = SsrfGuard(resolver=Scripted(RuntimeError("a fault")))
    with pytest.raises(UnresolvableError, match="a fault"):
        await guard.resolve("a.example", 80, ORGANISATION)
    assert "the resolver failed at a.example" in caplog.text


async def test_a_name_with_very_many_addresses_is_vetted_in_part() -> None:
    guard = SsrfGuard(
        resolver=answering(*(f"1.1.{number // 256}.{number % 256}" for number in range(4000)))
    )
    assert len(await guard.resolve("many.example", 80, ORGANISATION)) == 32


async def test_one_organisation_cannot_evict_the_names_of_another() -> None:
    guard = SsrfGuard(
        resolver=answering("1.1.1.1"),
        clock=lambda: 0.0,
        max_names=20,
        max_names_per_organisation=10,
    )
    for number in range(5):
        await guard.resolve(f"mine-{number}.example", 80, OTHER)
    for number in range(200):
        await guard.resolve(f"churn-{number}.example", 80, ORGANISATION)
    assert all(guard.cached(f"mine-{number}.example", OTHER) for number in range(5))
    assert (
        sum(
            guard.cached(f"churn-{number}.example", ORGANISATION) is not None
            for number in range(200)
        )
        == 10
    )


async def test_the_organisation_with_most_names_loses_one_first() -> None:
    guard = SsrfGuard(
        resolver=answering("1.1.1.1"),
        clock=lambda: 0.0,
        max_names=20,
        max_names_per_organisation=15,
    )
    for number in range(15):
        await guard.resolve(f"churn-{number}.example", 80, ORGANISATION)
    for number in range(8):
        await guard.resolve(f"mine-{number}.example", 80, OTHER)
    assert all(guard.cached(f"mine-{number}.example", OTHER) for number in range(8))
    assert guard._cache.size == 20
    assert [
        guard.cached(f"churn-{number}.example", ORGANISATION) is None for number in range(15)
    ] == [True] * 3 + [False] * 12


# Ports.


@pytest.mark.parametrize("port", [22, 25, 53, 2375, 5432, 6379, 9092, 11211, 27017, 61616])
async def test_ports_of_other_protocols_are_refused(port: int) -> None:
    guard = SsrfGuard(LOOPBACK, resolver=unreachable)
    for url in (f"http://127.0.0.1:{port}/", f"https://hooks.example:{port}/"):
        target = PushUrl.parse(url)
        with pytest.raises(BlockedError, match=f"port {port} .*ROOMS_REFUSE_PORTS"):
            guard.check_literal(target)
        with pytest.raises(BlockedError, match=f"port {port} .*ROOMS_REFUSE_PORTS"):
            await guard.resolve(target.host, target.port, ORGANISATION)


@pytest.mark.parametrize("port", [80, 443, 3000, 5000, 8000, 8080, 8443, 9000, 9200])
def test_ports_of_web_servers_are_allowed(port: int) -> None:
    SsrfGuard(resolver=unreachable).check_literal(PushUrl.parse(f"http://1.1.1.1:{port}/"))


def test_no_port_that_linux_gives_out_is_refused() -> None:
    assert not REFUSED_PORTS & set(range(32_768, 61_000))


async def test_the_operator_configures_the_refused_ports() -> None:
    guard = SsrfGuard(LOOPBACK, resolver=unreachable, refuse_ports={8080})
    guard.check_literal(PushUrl.parse("http://127.0.0.1:6379/"))
    assert await guard.resolve("127.0.0.1", 6379, ORGANISATION) == ("127.0.0.1",)
    # A cached name does not allow a refused port.
    with pytest.raises(BlockedError):
        await guard.resolve("127.0.0.1", 8080, ORGANISATION)
