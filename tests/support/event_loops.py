"""Run tests that depend on the event loop on both loops: that of asyncio and uvloop."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import pytest
import uvloop

_SERVER: Final = "tests/integration/rooms/api/server/"
BOTH_LOOPS: Final = frozenset(
    {
        "tests/contract/test_sender.py",
        *(
            f"{_SERVER}test_{name}.py"
            for name in ("fast_protocol", "connections", "framing", "tls_listener", "websocket")
        ),
    }
)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the loops of a test; a `conftest.py` imports this hook for its folder."""
    if item.nodeid.partition("::")[0] in BOTH_LOOPS:
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
