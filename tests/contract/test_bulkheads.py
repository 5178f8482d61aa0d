"""Organisations beside each other in one sender: what one of them or its endpoints do costs the others nothing."""

import asyncio
from ipaddress import ip_network

import pytest

from delivery.addresses import Network
from delivery.bulkhead import Bound
from delivery.connections import Limits
from delivery.guard import Guard
from delivery.sender import HttpSender
from delivery.target_policy import TargetPolicy
from rooms.domain.attempt import Answer, ErrorClass
from rooms.domain.ids import OrganisationId
from rooms.domain.target import Target
from rooms.metrics import Metrics
from rooms.ports import Sender
from tests.contract.endpoints import BOUND_S, OK, Stream, answering, hanging, serving

LOOPBACK: tuple[Network, ...] = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
ORGANISATION = OrganisationId("01900000-0000-7000-8000-000000000001")
OTHER = OrganisationId("01900000-0000-7000-8000-000000000002")
SHORT_S = 0.5


def at(port: int, *, host: str = "127.0.0.1") -> Target:
    return Target.parse(f"http://{host}:{port}/hook")


async def post(
    sender: Sender, target: Target, *, organisation: OrganisationId = ORGANISATION, timeout_s: float = 60
) -> Answer:
    sending = sender.send(target, b"webhook-id: 1\r\n", b"{}", organisation=organisation, timeout_s=timeout_s)
    return await asyncio.wait_for(sending, BOUND_S)


async def test_interim_answers_with_blank_lines_cost_no_slot() -> None:
    """Each of them once cost a slot for ever: after `max_connections` of them no webhook was called any more."""
    flood = b"HTTP/1.1 100 Continue\r\n\r\n\r\n\r\n" * 3 + b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"
    async with (
        serving(answering(flood)) as hostile,
        serving(answering(OK)) as healthy,
        HttpSender(Guard(LOOPBACK), limits=Limits(max_connections=2)) as sender,
    ):
        for _ in range(10):
            answer = await post(sender, at(hostile.port))
            assert (answer.status, answer.error) == (500, ErrorClass.STATUS)
        assert (await post(sender, at(healthy.port), organisation=OTHER)).status == 200


async def test_organisations_share_no_connection() -> None:
    """A late second answer on a kept connection can only be taken for one to its own organisation."""

    async def script(stream: Stream) -> None:
        while True:
            await stream.request()
            await stream.write(OK)

    async with serving(script) as endpoint, HttpSender(Guard(LOOPBACK)) as sender:
        for _ in range(3):
            for organisation in (ORGANISATION, OTHER):
                assert (await post(sender, at(endpoint.port), organisation=organisation)).status == 200
    assert endpoint.connections == 2


@pytest.mark.parametrize("bound", ["organisation", "endpoint"])
async def test_one_organisation_cannot_have_all_connections(bound: str) -> None:
    waits: list[str] = []
    limits = Limits(
        max_connections=4,
        max_per_organisation=2 if bound == "organisation" else None,
        max_per_endpoint=2 if bound == "endpoint" else None,
        sweep_s=0.02,
    )
    async with (
        serving(hanging) as stuck,
        serving(answering(OK)) as healthy,
        HttpSender(Guard(LOOPBACK), limits=limits, waited=waits.append) as sender,
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


async def test_an_idle_connection_of_its_own_makes_room_for_an_organisation() -> None:
    limits = Limits(max_connections=4, max_per_organisation=1, sweep_s=0.02)
    async with (
        serving(answering(OK)) as one,
        serving(answering(OK)) as two,
        HttpSender(Guard(LOOPBACK), limits=limits) as sender,
    ):
        assert (await post(sender, at(one.port), organisation=OTHER)).status == 200
        for endpoint in (one, two, one):
            assert (await post(sender, at(endpoint.port))).status == 200
            assert sender.connections == 2
        # The other organisation's was left alone.
        assert (await post(sender, at(one.port), organisation=OTHER)).status == 200
    assert (one.connections, two.connections) == (3, 1)


async def test_a_refused_port_is_not_dialled() -> None:
    async with serving(answering(OK)) as endpoint:
        guard = Guard(LOOPBACK, refuse_ports={endpoint.port})
        async with HttpSender(guard) as sender:
            answer = await post(sender, at(endpoint.port))
            assert (answer.status, answer.error) == (None, ErrorClass.BLOCKED)
            assert "ROOMS_REFUSE_PORTS" in answer.detail
    assert endpoint.connections == 0


async def test_what_waits_and_what_is_looked_up_is_counted() -> None:
    metrics = Metrics()
    policy = TargetPolicy(allow=tuple(LOOPBACK))
    with policy.open_guard(observe=metrics.looked_up, waited=metrics.waited_for_lookup) as guard:
        limits = Limits(max_connections=1, sweep_s=0.02)
        async with (
            serving(hanging) as stuck,
            HttpSender(guard, limits=limits, waited=metrics.waited_for_connection) as sender,
        ):
            hung = asyncio.create_task(post(sender, at(stuck.port, host="localhost")))
            await stuck.until(requests=1)
            assert (await post(sender, at(stuck.port), timeout_s=SHORT_S)).error is ErrorClass.TIMEOUT
            assert (await post(sender, at(stuck.port, host="10.0.0.1"))).error is ErrorClass.BLOCKED
            hung.cancel()
            await asyncio.gather(hung, return_exceptions=True)
    metrics.waited_for_lookup(Bound.ORGANISATION)
    text = metrics.text().decode()
    for line in (
        'rooms_webhook_connection_waits_total{bound="all"} 1.0',
        'rooms_name_lookups_total{outcome="answered"} 2.0',
        'rooms_name_lookups_total{outcome="refused"} 1.0',
        'rooms_name_lookup_waits_total{bound="organisation"} 1.0',
    ):
        assert line in text
