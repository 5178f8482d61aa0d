"""Test one sender with many organisations: none of them, and no endpoint, affects the others."""

import asyncio
from ipaddress import ip_network

import pytest

from delivery.push.http.bulkhead import LimitScope
from delivery.push.http.client import HttpSender
from delivery.push.http.connection import HttpLimits
from delivery.push.http.ssrf import IpNetwork, SsrfGuard, TargetPolicy
from rooms.domain.attempt import AttemptResult, ErrorClass
from rooms.domain.ids import OrganisationId
from rooms.domain.push_url import PushUrl
from rooms.metrics import Metrics
from rooms.ports import Sender
from tests.support.scripted_endpoints import BOUND_S, OK, Stream, answering, hanging, serving

LOOPBACK: tuple[IpNetwork, ...] = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
ORGANISATION = OrganisationId("01900000-0000-7000-8000-000000000001")
OTHER = OrganisationId("01900000-0000-7000-8000-000000000002")
SHORT_S = 0.5


def at(port: int, *, host: str = "127.0.0.1") -> PushUrl:
    return PushUrl.parse(f"http://{host}:{port}/hook")


async def post(
    sender: Sender,
    target: PushUrl,
    *,
    organisation: OrganisationId = ORGANISATION,
    timeout_s: float = 60,
) -> AttemptResult:
    sending = sender.send(
        target, b"webhook-id: 1\r\n", b"{}", organisation=organisation, timeout_s=timeout_s
    )
    return await asyncio.wait_for(sending, BOUND_S)


async def test_interim_responses_with_blank_lines_leak_no_slot() -> None:
    """Guard against a leak: each one cost a slot, until no webhook could be called."""
    flood = (
        b"HTTP/1.1 100 Continue\r\n\r\n\r\n\r\n" * 3
        + b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"
    )
    async with (
        serving(answering(flood)) as hostile,
        serving(answering(OK)) as healthy,
        HttpSender(SsrfGuard(LOOPBACK), limits=HttpLimits(max_connections=2)) as sender,
    ):
        for _ in range(10):
            answer = await post(sender, at(hostile.port))
            assert (answer.status, answer.error) == (500, ErrorClass.STATUS)
        assert (await post(sender, at(healthy.port), organisation=OTHER)).status == 200


async def test_organisations_share_no_connection() -> None:
    """Limit the effect of a late second response on a kept connection to its own organisation."""

    async def script(stream: Stream) -> None:
        while True:
            await stream.request()
            await stream.write(OK)

    async with serving(script) as endpoint, HttpSender(SsrfGuard(LOOPBACK)) as sender:
        for _ in range(3):
            for organisation in (ORGANISATION, OTHER):
                assert (
                    await post(sender, at(endpoint.port), organisation=organisation)
                ).status == 200
    assert endpoint.connections == 2


@pytest.mark.parametrize("bound", ["organisation", "endpoint"])
async def test_one_organisation_cannot_have_all_connections(bound: str) -> None:
    waits: list[str] = []
    limits = HttpLimits(
        max_connections=4,
        max_per_organisation=2 if bound == "organisation" else None,
        max_per_endpoint=2 if bound == "endpoint" else None,
        sweep_s=0.02,
    )
    async with (
        serving(hanging) as stuck,
        serving(answering(OK)) as healthy,
        HttpSender(SsrfGuard(LOOPBACK), limits=limits, on_wait=waits.append) as sender,
    ):
        hung = [asyncio.create_task(post(sender, at(stuck.port))) for _ in range(10)]
        await stuck.until(requests=2)
        for _ in range(10):
            assert (await post(sender, at(healthy.port), organisation=OTHER)).status == 200
        answer = await post(sender, at(stuck.port), timeout_s=SHORT_S)
        assert (answer.status, answer.error) == (None, ErrorClass.TIMEOUT)
        assert f"2 connections of its {bound}" in answer.detail
        assert (stuck.connections, sender.connections) == (2, 3)
        assert waits == [bound] * 9
        for task in hung:
            task.cancel()
        await asyncio.gather(*hung, return_exceptions=True)
        assert (await post(sender, at(healthy.port))).status == 200
    assert sender.connections == 0


async def test_an_organisation_evicts_its_own_idle_connection() -> None:
    limits = HttpLimits(max_connections=4, max_per_organisation=1, sweep_s=0.02)
    async with (
        serving(answering(OK)) as one,
        serving(answering(OK)) as two,
        HttpSender(SsrfGuard(LOOPBACK), limits=limits) as sender,
    ):
        assert (await post(sender, at(one.port), organisation=OTHER)).status == 200
        for endpoint in (one, two, one):
            assert (await post(sender, at(endpoint.port))).status == 200
            assert sender.connections == 2
        # The other organisation's connection was kept.
        assert (await post(sender, at(one.port), organisation=OTHER)).status == 200
    assert (one.connections, two.connections) == (3, 1)


async def test_a_refused_port_is_not_dialled() -> None:
    async with serving(answering(OK)) as endpoint:
        guard = SsrfGuard(LOOPBACK, refuse_ports={endpoint.port})
        async with HttpSender(guard) as sender:
            answer = await post(sender, at(endpoint.port))
            assert (answer.status, answer.error) == (None, ErrorClass.BLOCKED)
            assert "ROOMS_REFUSE_PORTS" in answer.detail
    assert endpoint.connections == 0


async def test_waits_and_lookups_are_counted() -> None:
    metrics = Metrics()
    policy = TargetPolicy(allow=tuple(LOOPBACK))
    with policy.open_guard(
        observe=metrics.count_name_lookup, on_wait=metrics.count_lookup_wait
    ) as guard:
        limits = HttpLimits(max_connections=1, sweep_s=0.02)
        async with (
            serving(hanging) as stuck,
            HttpSender(guard, limits=limits, on_wait=metrics.count_connection_wait) as sender,
        ):
            hung = asyncio.create_task(post(sender, at(stuck.port, host="localhost")))
            await stuck.until(requests=1)
            assert (
                await post(sender, at(stuck.port), timeout_s=SHORT_S)
            ).error is ErrorClass.TIMEOUT
            assert (await post(sender, at(stuck.port, host="10.0.0.1"))).error is ErrorClass.BLOCKED
            hung.cancel()
            await asyncio.gather(hung, return_exceptions=True)
    metrics.count_lookup_wait(LimitScope.ORGANISATION)
    text = metrics.render().decode()
    for line in (
        'rooms_webhook_connection_waits_total{bound="all"} 1.0',
        'rooms_name_lookups_total{outcome="answered"} 2.0',
        'rooms_name_lookups_total{outcome="refused"} 1.0',
        'rooms_name_lookup_waits_total{bound="organisation"} 1.0',
    ):
        assert line in text
