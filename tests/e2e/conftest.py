"""One service of each shape and one receiver for all tests from outside; each test opens a room of its own in it."""

import os
from collections.abc import Iterator
from typing import Final

import pytest

from tests.conftest import in_memory
from tests.support.room import Place
from tests.support.service import EMBEDDED, FULL, Service, running
from tests.support.webhook_sink import Sink, sinking

# The scenarios of these modules hold with every broker and election store.
_IN_BOTH_SHAPES: Final = (
    "test_scenarios",
    "test_publish",
    "test_pull",
    "test_streams",
    "test_identity",
    "test_govstack",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "shape" in metafunc.fixturenames:
        both = metafunc.module.__name__.rpartition(".")[2] in _IN_BOTH_SHAPES
        metafunc.parametrize(
            "shape", [EMBEDDED, FULL] if both else [EMBEDDED], indirect=True, scope="session"
        )


@pytest.fixture(scope="session")
def shape(request: pytest.FixtureRequest) -> str:
    """EMBEDDED or FULL."""
    return str(request.param)


@pytest.fixture(scope="package")
def embedded_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with in_memory(tmp_path_factory.mktemp("embedded")) as folder, running(folder) as service:
        yield service


@pytest.fixture(scope="package")
def full_service(
    artemis_url: str, zookeeper_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    settings = {
        "BROKER_URL": artemis_url,
        "ELECTION_URL": zookeeper_url,
        "ROOMS_FARM": f"e2e-{os.getpid()}",
    }
    with (
        in_memory(tmp_path_factory.mktemp("full")) as folder,
        running(folder, settings=settings) as service,
    ):
        yield service


@pytest.fixture
def service(shape: str, request: pytest.FixtureRequest) -> Service:
    """The one of that shape. Both stay to the last of these tests: they come by file, and a file has tests of both."""
    found: Service = request.getfixturevalue(f"{shape}_service")
    return found


@pytest.fixture(scope="session")
def sink() -> Iterator[Sink]:
    with sinking() as sink:
        yield sink


@pytest.fixture
def place(service: Service, sink: Sink) -> Place:
    return Place.open(service, sink)
