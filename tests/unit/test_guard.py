"""The guard: which addresses it lets through, in every dress they come in, and what it remembers."""

import asyncio
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.addresses import Network
from delivery.errors import BlockedError, UnresolvableError
from delivery.guard import Guard
from delivery.resolver import Resolver
from rooms.domain.ids import OrganisationId
from rooms.domain.target import Target

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
    assert Guard().refusal(ip_address(address)) is not None
    with pytest.raises(BlockedError, match="ROOMS_ALLOW_TARGETS"):
        await Guard(resolver=unreachable).vet(address, 80, ORGANISATION)
    with pytest.raises(BlockedError, match="ROOMS_ALLOW_TARGETS"):
        await Guard(resolver=answering(address)).vet("inside.example", 80, ORGANISATION)


@pytest.mark.parametrize("address", REACHED)
async def test_reached(address: str) -> None:
    assert await Guard(resolver=unreachable).vet(address, 80, ORGANISATION) == (str(ip_address(address)),)
    assert await Guard(resolver=answering(address)).vet("outside.example", 443, ORGANISATION) == (
        str(ip_address(address)),
    )


@pytest.mark.parametrize("host", TRICKS)
async def test_tricks_are_refused_without_asking_anyone(host: str) -> None:
    with pytest.raises(BlockedError):
        await Guard(resolver=unreachable).vet(host, 80, ORGANISATION)


@pytest.mark.parametrize("host", [host for host in TRICKS if host != "127.0.0.1."])
async def test_tricks_are_refused_even_where_loopback_is_allowed(host: str) -> None:
    with pytest.raises(BlockedError):
        await Guard(LOOPBACK, resolver=unreachable).vet(host, 80, ORGANISATION)


@given(st.integers(min_value=0, max_value=2**32 - 1).map(IPv4Address))
def test_no_refused_ipv4_gets_through_as_ipv6(address: IPv4Address) -> None:
    guard = Guard()
    number = int(address)
    dresses = [
        IPv6Address(number),
        IPv6Address(0xFFFF << 32 | number),
        IPv6Address(0x64_FF9B << 96 | number),
        IPv6Address(0x64_FF9B_0001 << 80 | number),
        IPv6Address(0x2002 << 112 | number << 80 | 1),
        IPv6Address(0x2001_0000 << 96 | 0x0808_0808 << 64 | number ^ 0xFFFF_FFFF),
    ]
    assert all(guard.refusal(dress) is not None for dress in dresses)
    isatap = IPv6Address(0x2606_2800 << 96 | 0x5EFE << 32 | number)
    assert (guard.refusal(isatap) is None) == (guard.refusal(address) is None)


@given(st.integers(min_value=0, max_value=2**128 - 1).map(IPv6Address) | st.integers(0, 2**32 - 1).map(IPv4Address))
def test_what_is_let_through_is_global(address: IPv4Address | IPv6Address) -> None:
    if Guard().refusal(address) is None:
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
async def test_allow_list_opens_what_it_names(allowed: str, address: str, reached: bool) -> None:  # noqa: FBT001 an expected value
    guard = Guard((ip_network(allowed),), resolver=answering(address))
    if reached:
        assert await guard.vet("some.example", 80, ORGANISATION) == (str(ip_address(address)),)
    else:
        with pytest.raises(BlockedError):
            await guard.vet("some.example", 80, ORGANISATION)


async def test_both_forms_allowed_open_the_embedded_one() -> None:
    allow = (ip_network("127.0.0.0/8"), ip_network("::ffff:0:0/96"))
    guard = Guard(allow, resolver=unreachable)
    assert await guard.vet("::ffff:127.0.0.1", 80, ORGANISATION) == ("::ffff:7f00:1",)


async def test_refused_addresses_of_a_name_are_left_out() -> None:
    guard = Guard(resolver=answering("10.0.0.1", "1.1.1.1", "::1", "2606:4700::1111"))
    assert await guard.vet("mixed.example", 80, ORGANISATION) == ("1.1.1.1", "2606:4700::1111")


async def test_detail_does_not_tell_inner_addresses() -> None:
    with pytest.raises(BlockedError) as caught:
        await Guard(resolver=answering("10.20.30.40", "127.0.0.1")).vet("inside.example", 80, ORGANISATION)
    assert "10.20" not in str(caught.value)
    assert "a private or a loopback address" in str(caught.value)


async def test_name_without_address_is_unresolvable() -> None:
    async def failing(host: str) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    for resolver in (failing, answering(), answering("no address at all")):
        with pytest.raises(UnresolvableError):
            await Guard(resolver=resolver).vet("nowhere.example", 80, ORGANISATION)


async def test_system_resolver_is_vetted_as_well() -> None:
    with pytest.raises(BlockedError, match="loopback"):
        await Guard().vet("localhost", 80, ORGANISATION)
    assert set(await Guard(LOOPBACK).vet("localhost", 80, ORGANISATION)) <= {"127.0.0.1", "::1"}


class Counting:
    """A resolver that counts, and answers when it is let."""

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


async def test_verdicts_are_kept_for_their_time() -> None:
    resolver, now = Counting(), 100.0
    guard = Guard(resolver=resolver, clock=lambda: now, fresh_s=5)
    assert guard.known("a.example", ORGANISATION) is None
    assert await guard.vet("a.example", 80, ORGANISATION) == guard.known("a.example", ORGANISATION) == ("1.1.1.1",)
    now = 104.9
    resolver.answer = ["10.0.0.1"]
    assert await guard.vet("a.example", 80, ORGANISATION) == ("1.1.1.1",)
    assert resolver.asked == ["a.example"]
    now = 105.0
    assert guard.known("a.example", ORGANISATION) is None
    for _ in range(2):
        with pytest.raises(BlockedError):
            await guard.vet("a.example", 80, ORGANISATION)
        assert guard.known("a.example", ORGANISATION) is None
    assert resolver.asked == ["a.example"] * 2


async def test_memory_is_bounded_and_forgets_the_oldest() -> None:
    resolver = Counting()
    guard = Guard(resolver=resolver, clock=lambda: 0.0, max_names=3)
    for name in ("a.example", "b.example", "c.example", "d.example"):
        await guard.vet(name, 80, ORGANISATION)
    assert [
        guard.known(name, ORGANISATION) is None for name in ("a.example", "b.example", "c.example", "d.example")
    ] == [
        True,
        False,
        False,
        False,
    ]


async def test_one_look_up_a_name_and_cancelling_one_asker_hurts_no_other() -> None:
    resolver = Counting()
    resolver.let.clear()
    guard = Guard(resolver=resolver)
    askers = [asyncio.create_task(guard.vet("a.example", 80, ORGANISATION)) for _ in range(5)]
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
def test_check_of_literals(url: str, allow: tuple[Network, ...], refused: bool) -> None:  # noqa: FBT001 an expected value
    guard = Guard(allow, resolver=unreachable)
    if refused:
        with pytest.raises(ValueError, match="ROOMS_ALLOW_TARGETS"):
            guard.check_literal(Target.parse(url))
    else:
        guard.check_literal(Target.parse(url))
