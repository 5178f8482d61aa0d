"""Share the fixtures of command-line tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import fake_api
from tests.support.cli_runner import Terminal
from tests.support.fake_api import FakeRooms, Served


@pytest.fixture(scope="session")
def fakes() -> Iterator[Served]:
    """Serve fake APIs."""
    with fake_api.serving() as server:
        yield server


@pytest.fixture
def fake(fakes: Served) -> FakeRooms:
    """Return a fresh fake API."""
    return fakes.renew()


@pytest.fixture
def terminal(tmp_path: Path, fake: FakeRooms) -> Terminal:
    """Return a terminal that is configured for the fake API, with a key."""
    return Terminal(tmp_path, {"ROOMS_URL": fake.url, "ROOMS_API_KEY": fake_api.KEY})
