"""Test that the worker's bounds of targets and connections are those of its settings."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from delivery.push.errors import BlockedError
from delivery.push.http import ssrf
from delivery.push.http.connection import HttpLimits
from delivery.push.http.ssrf import SsrfGuard, TargetPolicy
from rooms.app import worker
from rooms.domain.ids import OrganisationId
from rooms.domain.push_url import PushUrl
from rooms.settings import read_settings

ORGANISATION = OrganisationId("01900000-0000-7000-8000-000000000001")


class SilentResolver:
    """Answer no lookup."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        await asyncio.Event().wait()
        return ()

    def close(self) -> None:
        """Hold nothing."""


class OpenedError(Exception):
    """Stop the worker where its sender is opened."""


async def opened(
    monkeypatch: pytest.MonkeyPatch, connections: int, **environment: str
) -> tuple[TargetPolicy, HttpLimits]:
    """Return the policy and the limits with which a worker of these settings opens its sender."""
    found: list[tuple[TargetPolicy, HttpLimits]] = []
    policies: list[TargetPolicy] = []

    def target_policy(settings: Any) -> TargetPolicy:
        policies.append(ssrf.target_policy(settings))
        return policies[-1]

    async def open_cipher(*_: object) -> None:
        """Need no database."""

    def open_sender(guard: SsrfGuard, *, limits: HttpLimits, **_: object) -> None:
        assert isinstance(guard, SsrfGuard)
        found.append((policies[-1], limits))
        raise OpenedError

    monkeypatch.setattr(worker, "target_policy", target_policy)
    monkeypatch.setattr(worker, "open_checked_cipher", open_cipher)
    monkeypatch.setattr(worker, "HttpSender", open_sender)
    with pytest.raises(OpenedError):
        await worker.serve_worker(
            read_settings(environment), "postgresql://unused", connections=connections
        )
    ((policy, limits),) = found
    return policy, limits


async def test_a_share_of_the_connections_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    _, limits = await opened(monkeypatch, 800)
    assert limits.max_connections == 800
    assert (limits.max_per_organisation, limits.max_per_endpoint) == (200, 100)
    # A worker of few connections still has one for each.
    _, limits = await opened(monkeypatch, 3)
    assert (limits.max_per_organisation, limits.max_per_endpoint) == (1, 1)


async def test_settings_bound_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    _, limits = await opened(
        monkeypatch, 800, ROOMS_ORGANISATION_CONNECTIONS="70", ROOMS_ENDPOINT_CONNECTIONS="6"
    )
    assert limits.max_connections == 800
    assert (limits.max_per_organisation, limits.max_per_endpoint) == (70, 6)


async def test_settings_bound_the_lookups_of_an_organisation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = SilentResolver()
    monkeypatch.setattr(ssrf, "DnsResolver", lambda: silent)
    policy, _ = await opened(monkeypatch, 8, ROOMS_ORGANISATION_LOOKUPS="3")
    # The second is that of the worker's sandbox, which gets its policy as text.
    for one in (policy, TargetPolicy.from_text(policy.to_text())):
        silent.asked.clear()
        waits: list[object] = []
        with one.open_guard(on_wait=waits.append) as guard:
            tasks = [
                asyncio.create_task(guard.resolve(f"{number}.example", 443, ORGANISATION))
                for number in range(5)
            ]
            # Enough turns of the loop for each to begin its lookup, if it may.
            for _ in range(20):
                await asyncio.sleep(0)
            assert (len(silent.asked), len(waits)) == (3, 2)
            for task in tasks:
                task.cancel()
            lookups = list(guard._pending.values())
            for lookup in lookups:
                lookup.cancel()
            await asyncio.gather(*tasks, *lookups, return_exceptions=True)


async def test_settings_refuse_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, _ = await opened(monkeypatch, 8, ROOMS_REFUSE_PORTS="8500")
    for one in (policy, TargetPolicy.from_text(policy.to_text())):
        with one.open_guard() as guard:
            guard.check_literal(PushUrl.parse("http://1.1.1.1:6379/"))
            with pytest.raises(BlockedError, match="port 8500 "):
                guard.check_literal(PushUrl.parse("http://1.1.1.1:8500/"))
            with pytest.raises(BlockedError, match="port 8500 "):
                await guard.resolve("1.1.1.1", 8500, ORGANISATION)
