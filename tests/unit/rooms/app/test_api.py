"""Test the bounds of connections by settings and by the system."""

import ipaddress
from collections.abc import Callable

import pytest

from rooms.app.api import make_connection_registry
from rooms.metrics import Metrics
from rooms.settings import read_settings


def files(limit: int, asked: list[int]) -> Callable[[int], int]:
    """Fake a system that allows a process so many files."""

    def raised(wanted: int) -> int:
        asked.append(wanted)
        return min(wanted, limit)

    return raised


def test_there_are_fewer_connections_than_files(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("rooms.app.file_limit.raise_file_limit", files(1024, asked))
    bounds = make_connection_registry(read_settings({}), Metrics()).limits
    assert asked == [8192 + 256]
    assert (bounds.connections, bounds.unauthenticated, bounds.authenticated) == (768, 2048, 704)


def test_settings_override_the_computed_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooms.app.file_limit.raise_file_limit", files(1 << 20, []))
    settings = read_settings({
        "ROOMS_MAX_CONNECTIONS": "500", "ROOMS_MAX_UNAUTHENTICATED_CONNECTIONS": "100",
        "ROOMS_MAX_CONNECTIONS_PER_ADDRESS": "7", "ROOMS_TRUSTED_PROXIES": "10.0.0.0/8", "ROOMS_HEAD_TIMEOUT_S": "3",
        "ROOMS_IDLE_TIMEOUT_S": "4", "ROOMS_MIN_BODY_BYTES_PER_S": "5",
    })  # fmt: skip
    bounds = make_connection_registry(settings, Metrics()).limits
    assert (bounds.connections, bounds.unauthenticated, bounds.per_address) == (500, 100, 7)
    assert bounds.trusted == (ipaddress.ip_network("10.0.0.0/8"),)
    assert (bounds.head_timeout_s, bounds.idle_timeout_s, bounds.body_bytes_per_s) == (3, 4, 5)


async def test_connections_are_counted_in_metrics() -> None:
    metrics = Metrics()
    connections = make_connection_registry(read_settings({}), metrics)
    connections.count_closed("slow_request")

    class Opened:
        address = "192.0.2.1"
        idle = True
        awaits_body = False
        unsent_bytes = 0

        def check_timeouts(self, now: float) -> None:
            """Wait."""

        def drop(self) -> None:
            """Continue."""

    opened = Opened()
    assert connections.add(opened)
    text = metrics.render().decode()
    assert 'rooms_http_connections_closed_total{reason="slow_request"} 1.0' in text
    assert 'rooms_http_connections{authenticated="false"} 1.0' in text
    connections.remove(opened)
