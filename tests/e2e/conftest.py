"""One service of each shape and one receiver for all tests from outside; each test opens a room of its own in it."""

import os
from collections.abc import Iterator
from typing import Final

import pytest

from tests.place import Place
from tests.service import EMBEDDED, FULL, Service, running
from tests.sink import Sink, sinking

# What these modules tell of a service holds whichever broker and election it stands on.
_IN_BOTH_SHAPES: Final = ("test_scenarios", "test_publish", "test_pull", "test_streams")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "shape" in metafunc.fixturenames:
        both = metafunc.module.__name__.rpartition(".")[2] in _IN_BOTH_SHAPES
        metafunc.parametrize("shape", [EMBEDDED, FULL] if both else [EMBEDDED], indirect=True, scope="session")


@pytest.fixture(scope="session")
def shape(request: pytest.FixtureRequest) -> str:
    """EMBEDDED or FULL."""
    return str(request.param)


@pytest.fixture(scope="session")
def service(shape: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    settings = {}
    if shape == FULL:
        settings = {
            "BROKER_URL": request.getfixturevalue("artemis_url"),
            "ELECTION_URL": request.getfixturevalue("zookeeper_url"),
            "ROOMS_FARM": f"e2e-{os.getpid()}",
        }
    with running(tmp_path_factory.mktemp("service"), settings=settings) as service:
        yield service


@pytest.fixture(scope="session")
def sink() -> Iterator[Sink]:
    with sinking() as sink:
        yield sink


@pytest.fixture
def place(service: Service, sink: Sink) -> Place:
    return Place.open(service, sink)
