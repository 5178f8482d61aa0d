"""Test the SSRF guard: the addresses it allows, in every notation, and its cache."""

import asyncio
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.push.errors import BlockedError, UnresolvableError
from delivery.push.http.dns import Resolver
from delivery.push.http.ssrf import IpNetwork, SsrfGuard
from rooms.domain.ids import OrganisationId
from rooms.domain.push_url import PushUrl

ORGANISATION = OrganisationId("01900000-0000-7000-8000-000000000001")
OTHER = OrganisationId("01900000-0000-7000-8000-000000000002")
LOOPBACK = (ip_network("127.0.0.0/8"), ip_network("::1/128"))

REFUSED = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "100.127.255.255",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.8",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::2",
    "::127.0.0.1",
    "::8.8.8.8",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "::ffff:0:127.0.0.1",
    "64:ff9b::127.0.0.1",
    "64:ff9b::8.8.8.8",
    "64:ff9b:1::10.0.0.1",
    "64:ff9b:1:7f00:0:100::",
    "100::1",
    "100:0:0:1::1",
    "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:2::1",
    "2001:10::1",
    "2001:db8::1",
    "2002:7f00:1::1",
    "2002:808:808::1",
    "2606:2800::5efe:127.0.0.1",
    "2606:2800::200:5efe:10.0.0.1",
    "3fff::1",
    "4000::1",
    "5f00::1",
    "fc00::1",
    "fd12:3456::1",
    "fe80::1",
    "fe80::1%eth0",
    "febf::1",
    "fec0::1",
    "ff02::1",
]
REACHED = [
    "1.1.1.1",
    "8.8.8.8",
    "9.255.255.255",
    "11.0.0.0",
    "100.63.255.255",
    "100.128.0.0",
    "172.15.255.255",
    "172.32.0.0",
    "192.0.1.1",
    "192.167.255.255",
    "198.17.255.255",
    "198.20.0.0",
    "223.255.255.255",
    "2001:200::1",
    "2001:4860:4860::8888",
    "2606:2800:220:1::1",
    "2606:2800::5efe:8.8.8.8",
    "3ffe::1",
]
TRICKS = [
    "2130706433",
    "0x7f000001",
    "0x7f.1",
    "0X7F.0.0.1",
    "0177.0.0.1",
    "017700000001",
    "127.1",
    "127.0.1",
    "127.0.0.01",
    "127.0.0.1.",
    "0",
    "127.1.",
    "::1%lo",
    "fe80::1%25eth0",
    "[::1]",
    "::ffff:0x7f.1",
    "1.2.3.4.5",
    "256.256.256.256",
]


def answering(*addresses: str) -> Resolver:
    async def resolver(host: str) -> Sequence[str]:
        return addresses

    return resolver


async def unreachable(host: str) -> Sequence[str]:
    raise AssertionError(f"{host} needs no look-up")


@pytest.mark.parametrize("address", REFUSED)
async def test_refused(address: str) -> None:
    assert SsrfGuard().refused_kind(ip_address(address)) is not None
    with pytest.raises(BlockedError, match="ROOMS_ALLOW_TARGETS"):
        await SsrfGuard(resolver=unreachable).resolve(address, 80, ORGANISATION)
    with pytest.raises(BlockedError, match="ROOMS_ALLOW_TARGETS"):
        await SsrfGuard(resolver=answering(address)).resolve("inside.example", 80, ORGANISATION)


@pytest.mark.parametrize("address", REACHED)
async def test_reached(address: str) -> None:
    assert await SsrfGuard(resolver=unreachable).resolve(address, 80, ORGANISATION) == (
        str(ip_address(address)),
    )
    assert await SsrfGuard(resolver=answering(address)).resolve(
        "outside.example", 443, ORGANISATION
    ) == (str(ip_address(address)),)


@pytest.mark.parametrize("host", TRICKS)
async def test_ambiguous_hosts_are_refused_without_a_lookup(host: str) -> None:
    with pytest.raises(BlockedError):
        await SsrfGuard(resolver=unreachable).resolve(host, 80, ORGANISATION)


@pytest.mark.parametrize("host", [host for host in TRICKS if host != "127.0.0.1."])
async def test_ambiguous_hosts_are_refused_even_if_loopback_is_allowed(host: str) -> None:
    with pytest.raises(BlockedError):
        await SsrfGuard(LOOPBACK, resolver=unreachable).resolve(host, 80, ORGANISATION)


@given(st.integers(min_value=0, max_value=2**32 - 1).map(IPv4Address))
def test_no_refused_ipv4_gets_through_as_ipv6(address: IPv4Address) -> None:
    guard = SsrfGuard()
    number = int(address)
    dresses = [
        IPv6Address(number),
        IPv6Address(0xFFFF << 32 | number),
        IPv6Address(0x64_FF9B << 96 | number),
        IPv6Address(0x64_FF9B_0001 << 80 | number),
        IPv6Address(0x2002 << 112 | number << 80 | 1),
        IPv6Address(0x2001_0000 << 96 | 0x0808_0808 << 64 | number ^ 0xFFFF_FFFF),
    ]
    assert all(guard.refused_kind(dress) is not None for dress in dresses)
    isatap = IPv6Address(0x2606_2800 << 96 | 0x5EFE << 32 | number)
    assert (guard.refused_kind(isatap) is None) == (guard.refused_kind(address) is None)


@given(
    st.integers(min_value=0, max_value=2**128 - 1).map(IPv6Address)
    | st.integers(0, 2**32 - 1).map(IPv4Address)
)
def test_every_allowed_address_is_global(address: IPv4Address | IPv6Address) -> None:
    if SsrfGuard().refused_kind(address) is None:
        assert address.is_global
        assert not address.is_multicast


@pytest.mark.parametrize(
    ("allowed", "address", "reached"),
    [
        ("127.0.0.0/8", "127.0.0.1", True),
        ("127.0.0.0/8", "10.0.0.1", False),
        ("127.0.0.0/8", "::1", False),
        ("127.0.0.0/8", "::ffff:127.0.0.1", False),
        ("127.0.0.0/8", "64:ff9b::127.0.0.1", False),
        ("127.0.0.0/8", "2002:7f00:1::1", False),
        ("127.0.0.0/8", "::127.0.0.1", False),
        ("::1/128", "::1", True),
        ("::/0", "fd00::1", True),
        ("::/0", "::ffff:127.0.0.1", False),
        ("::/0", "64:ff9b::127.0.0.1", False),
        ("64:ff9b::/96", "64:ff9b::8.8.8.8", True),
        ("64:ff9b::/96", "64:ff9b::10.0.0.1", False),
        ("0.0.0.0/0", "169.254.169.254", True),
        ("fe80::/10", "fe80::1", True),
        ("fe80::/10", "fe80::1%eth0", False),
    ],
)
async def test_the_allow_list_allows_what_it_names(
    allowed: str,
    address: str,
    reached: bool,  # noqa: FBT001 - an expected value
) -> None:
    guard = SsrfGuard((ip_network(allowed),), resolver=answering(address))
    if reached:
        assert await guard.resolve("some.example", 80, ORGANISATION) == (str(ip_address(address)),)
    else:
        with pytest.raises(BlockedError):
            await guard.resolve("some.example", 80, ORGANISATION)


async def test_both_forms_must_be_allowed_for_an_embedded_address() -> None:
    allow = (ip_network("127.0.0.0/8"), ip_network("::ffff:0:0/96"))
    guard = SsrfGuard(allow, resolver=unreachable)
    assert await guard.resolve("::ffff:127.0.0.1", 80, ORGANISATION) == ("::ffff:7f00:1",)


async def test_refused_addresses_of_a_name_are_left_out() -> None:
    guard = SsrfGuard(resolver=answering("10.0.0.1", "1.1.1.1", "::1", "2606:4700::1111"))
    assert await guard.resolve("mixed.example", 80, ORGANISATION) == ("1.1.1.1", "2606:4700::1111")


async def test_the_detail_does_not_name_internal_addresses() -> None:
    with pytest.raises(BlockedError) as caught:
        await SsrfGuard(resolver=answering("10.20.30.40", "127.0.0.1")).resolve(
            "inside.example", 80, ORGANISATION
        )
    assert "10.20" not in str(caught.value)
    assert "a private or a loopback address" in str(caught.value)


async def test_name_without_address_is_unresolvable() -> None:
    async def failing(host: str) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    for resolver in (failing, answering(), answering("no address at all")):
        with pytest.raises(UnresolvableError):
            await SsrfGuard(resolver=resolver).resolve("nowhere.example", 80, ORGANISATION)


async def test_system_resolver_is_vetted_as_well() -> None:
    with pytest.raises(BlockedError, match="loopback"):
        await SsrfGuard().resolve("localhost", 80, ORGANISATION)
    assert set(await SsrfGuard(LOOPBACK).resolve("localhost", 80, ORGANISATION)) <= {
        "127.0.0.1",
        "::1",
    }


class Counting:
    """Count lookups, and answer when the test allows it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer: list[str] = ["1.1.1.1"]
        self.called = asyncio.Event()
        self.let = asyncio.Event()
        self.let.set()

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        self.called.set()
        await self.let.wait()
        return tuple(self.answer)


async def test_results_are_cached_for_their_time() -> None:
    resolver, now = Counting(), 100.0
    guard = SsrfGuard(resolver=resolver, clock=lambda: now, fresh_s=5)
    assert guard.cached("a.example", ORGANISATION) is None
    assert (
        await guard.resolve("a.example", 80, ORGANISATION)
        == guard.cached("a.example", ORGANISATION)
        == ("1.1.1.1",)
    )
    now = 104.9
    resolver.answer = ["10.0.0.1"]
    assert await guard.resolve("a.example", 80, ORGANISATION) == ("1.1.1.1",)
    assert resolver.asked == ["a.example"]
    now = 105.0
    assert guard.cached("a.example", ORGANISATION) is None
    for _ in range(2):
        with pytest.raises(BlockedError):
            await guard.resolve("a.example", 80, ORGANISATION)
        assert guard.cached("a.example", ORGANISATION) is None
    assert resolver.asked == ["a.example"] * 2


async def test_the_cache_is_bounded_and_drops_the_oldest() -> None:
    resolver = Counting()
    guard = SsrfGuard(resolver=resolver, clock=lambda: 0.0, max_names=3)
    for name in ("a.example", "b.example", "c.example", "d.example"):
        await guard.resolve(name, 80, ORGANISATION)
    assert [
        guard.cached(name, ORGANISATION) is None
        for name in ("a.example", "b.example", "c.example", "d.example")
    ] == [
        True,
        False,
        False,
        False,
    ]


async def test_one_lookup_serves_all_and_cancelling_one_attempt_affects_no_other() -> None:
    resolver = Counting()
    resolver.let.clear()
    guard = SsrfGuard(resolver=resolver)
    askers = [asyncio.create_task(guard.resolve("a.example", 80, ORGANISATION)) for _ in range(5)]
    await asyncio.wait_for(resolver.called.wait(), 30)
    askers[0].cancel()
    resolver.let.set()
    results = await asyncio.gather(*askers, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [("1.1.1.1",)] * 4
    assert resolver.asked == ["a.example"]


@pytest.mark.parametrize(
    ("url", "allow", "refused"),
    [
        ("http://127.0.0.1:8080/", (), True),
        ("http://169.254.169.254/latest/meta-data", (), True),
        ("http://[::1]/", (), True),
        ("http://[::ffff:127.0.0.1]/", LOOPBACK, True),
        ("http://localhost/", (), True),
        ("http://LOCALHOST./", (), True),
        ("http://a.localhost/", (), True),
        ("http://ip6-localhost/", (), True),
        ("http://localhost/", LOOPBACK, False),
        ("http://127.0.0.1/", LOOPBACK, False),
        ("http://example.com/", (), False),
        ("http://1.1.1.1/", (), False),
        ("http://notlocalhost/", (), False),
    ],
)
def test_literals_are_checked_without_a_lookup(
    url: str,
    allow: tuple[IpNetwork, ...],
    refused: bool,  # noqa: FBT001 - an expected value
) -> None:
    guard = SsrfGuard(allow, resolver=unreachable)
    if refused:
        with pytest.raises(ValueError, match="ROOMS_ALLOW_TARGETS"):
            guard.check_literal(PushUrl.parse(url))
    else:
        guard.check_literal(PushUrl.parse(url))
