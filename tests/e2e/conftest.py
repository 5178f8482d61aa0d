"""One service and one receiver for all tests from outside; each test opens a room of its own in it."""

from collections.abc import Iterator

import pytest

from tests.place import Place
from tests.service import Service, running
from tests.sink import Sink, sinking


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture(scope="session")
def sink() -> Iterator[Sink]:
    with sinking() as sink:
        yield sink


@pytest.fixture
def place(service: Service, sink: Sink) -> Place:
    return Place.open(service, sink)
