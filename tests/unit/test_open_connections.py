"""The bounds of connections as the settings and the system have them."""

import ipaddress
from collections.abc import Callable

import pytest

from rooms.composition.api import open_connections
from rooms.metrics import Metrics
from rooms.settings import read_settings


def files(limit: int, asked: list[int]) -> Callable[[int], int]:
    """A system that lets a process have so many."""

    def raised(wanted: int) -> int:
        asked.append(wanted)
        return min(wanted, limit)

    return raised


def test_there_are_fewer_connections_than_files(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("rooms.composition.api.raise_file_limit", files(1024, asked))
    bounds = open_connections(read_settings({}), Metrics()).bounds
    assert asked == [8192 + 256]
    assert (bounds.connections, bounds.unauthenticated, bounds.authenticated) == (768, 2048, 704)


def test_an_operator_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooms.composition.api.raise_file_limit", files(1 << 20, []))
    settings = read_settings({
        "ROOMS_MAX_CONNECTIONS": "500", "ROOMS_MAX_UNAUTHENTICATED_CONNECTIONS": "100",
        "ROOMS_MAX_CONNECTIONS_PER_ADDRESS": "7", "ROOMS_TRUSTED_ADDRESSES": "10.0.0.0/8", "ROOMS_HEAD_TIMEOUT_S": "3",
        "ROOMS_IDLE_TIMEOUT_S": "4", "ROOMS_MIN_BODY_BYTES_PER_S": "5",
    })  # fmt: skip
    bounds = open_connections(settings, Metrics()).bounds
    assert (bounds.connections, bounds.unauthenticated, bounds.per_address) == (500, 100, 7)
    assert bounds.trusted == (ipaddress.ip_network("10.0.0.0/8"),)
    assert (bounds.head_s, bounds.idle_s, bounds.body_bytes_per_s) == (3, 4, 5)


async def test_connections_are_counted_where_an_operator_looks() -> None:
    metrics = Metrics()
    connections = open_connections(read_settings({}), metrics)
    connections.count("slow_request")

    class Opened:
        address = "192.0.2.1"
        idle = True
        unread = 0

        def check(self, now: float) -> None:
            """Wait."""

        def drop(self) -> None:
            """Go."""

    opened = Opened()
    assert connections.opened(opened)
    text = metrics.text().decode()
    assert 'rooms_http_connections_closed_total{reason="slow_request"} 1.0' in text
    assert 'rooms_http_connections{authenticated="false"} 1.0' in text
    connections.closed(opened)
