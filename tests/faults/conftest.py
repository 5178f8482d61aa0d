"""A crew on one database for all tests of a module, and a receiver of webhooks."""

import os
from collections.abc import Iterator

import pytest

from tests.conftest import administer, at
from tests.support.process_group import Crew, Process, assembled
from tests.support.room import Place
from tests.support.webhook_sink import Sink, sinking


@pytest.fixture(scope="module")
def sink() -> Iterator[Sink]:
    with sinking() as sink:
        yield sink


@pytest.fixture(scope="module", params=["embedded"])
def broker_url(request: pytest.FixtureRequest) -> str | None:
    """None, where PostgreSQL is the broker; modules that prove both shapes parametrise it with "relayed", too."""
    return None if request.param == "embedded" else request.getfixturevalue("artemis_url")


@pytest.fixture(scope="module")
def crew_and_api(
    postgres_url: str,
    template: str,
    database_numbers: Iterator[int],
    tmp_path_factory: pytest.TempPathFactory,
    broker_url: str | None,
) -> Iterator[tuple[Crew, Process]]:
    name = f"crew_{os.getpid()}_{next(database_numbers)}"
    administer(postgres_url, "CREATE DATABASE {} TEMPLATE {}", name, template)
    with assembled(
        tmp_path_factory.mktemp("crew"), at(postgres_url, name), broker_url
    ) as crew_and_api:
        yield crew_and_api
    administer(postgres_url, "DROP DATABASE {} WITH (FORCE)", name)


@pytest.fixture
def crew(crew_and_api: tuple[Crew, Process]) -> Iterator[Crew]:
    """Start the API that survives; every other process of a test ends with it."""
    crew, api = crew_and_api
    yield crew
    crew.end_all_but(api)


@pytest.fixture
def place(crew: Crew, sink: Sink) -> Place:
    return Place.open(crew, sink, delivery_delay_ms=50)
