"""Check what the election assumes of the internals of kazoo, so that an upgrade fails here by name."""

import inspect
import re
from importlib import import_module
from types import SimpleNamespace

import pytest
from kazoo.protocol.connection import ConnectionHandler

from delivery.leadership.kazoo_internals import ASSUMED, ping_only_when, report_timeout
from tests.support.assumed_names import names_of, parameters

MODULE = "delivery/leadership/kazoo_internals.py"


@pytest.mark.parametrize("path", ASSUMED)
def test_kazoo_has_the_names_that_are_used(path: str) -> None:
    module, _, name = path.rpartition(".")
    missing = ASSUMED[path] - names_of(getattr(import_module(module), name))
    assert not missing, (
        f"kazoo's {name} has no {', '.join(sorted(missing))} any more: adapt {MODULE}"
    )


def test_kazoo_connects_and_pings_by_the_methods_that_are_replaced() -> None:
    source = inspect.getsource(ConnectionHandler)
    for call in (r"read_timeout, connect_timeout = self\._connect\(", r"self\._send_ping\("):
        assert re.search(call, source), f"kazoo no longer calls {call}: adapt {MODULE}"
    assert parameters(ConnectionHandler._send_ping) == ["self", "connect_timeout"]


def test_kazoo_waits_for_two_thirds_of_the_granted_timeout() -> None:
    source = inspect.getsource(ConnectionHandler._connect)
    assert "read_timeout = negotiated_session_timeout * 2.0 / 3.0" in source, (
        f"kazoo derives its timeout differently: adapt {MODULE}"
    )


def test_each_granted_timeout_is_reported() -> None:
    connection = SimpleNamespace(_connect=lambda *_: (8000.0, 4000.0))
    reported: list[float] = []
    report_timeout(SimpleNamespace(_connection=connection), reported.append)
    assert connection._connect("host", "127.0.0.1", 2181) == (8000.0, 4000.0)
    assert reported == [12.0]


def test_pings_are_sent_only_when_wanted() -> None:
    sent: list[float] = []
    connection = SimpleNamespace(_send_ping=sent.append)
    wanted = [False, True]
    ping_only_when(SimpleNamespace(_connection=connection), wanted.pop)
    connection._send_ping(1.0)
    connection._send_ping(2.0)
    assert sent == [1.0]
