"""What the tests of the command line share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import fake_rooms
from tests.fake_rooms import FakeRooms, Served
from tests.terminal import Terminal


@pytest.fixture(scope="session")
def fakes() -> Iterator[Served]:
    """Where fakes are reached."""
    with fake_rooms.serving() as server:
        yield server


@pytest.fixture
def fake(fakes: Served) -> FakeRooms:
    """A service of shapes, no more."""
    return fakes.renew()


@pytest.fixture
def terminal(tmp_path: Path, fake: FakeRooms) -> Terminal:
    """A terminal on whose machine the fake runs, with a key."""
    return Terminal(tmp_path, {"ROOMS_URL": fake.url, "ROOMS_API_KEY": fake_rooms.KEY})
