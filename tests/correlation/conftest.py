"""One Spark for all tests of the analysis; without Java they are skipped on a desk and fail in CI."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.correlation.sparks import Sparks, environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.correlation.ahead import Ahead
    from tests.correlation.analysed import Analyse, Analysed
    from tests.correlation.logs import Mixed
    from tests.correlation.planted import Planted

NOW = datetime(2026, 1, 9, tzinfo=UTC)


@pytest.fixture(scope="session")
def java() -> None:
    """Java is there, or the wheel that brings one."""
    from delivery.correlation.errors import NoJavaError
    from delivery.correlation.java import find_java

    try:
        find_java()
    except NoJavaError as exc:
        if os.environ.get("CI"):
            pytest.fail(str(exc))
        pytest.skip(str(exc))


@pytest.fixture(scope="session")
def sparks(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sparks]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(tmp_path_factory.mktemp("spark")).items():
            patch.setenv(name, value)
        sparks = Sparks()
        yield sparks
        sparks.close()


@pytest.fixture(scope="session")
def ahead(request: pytest.FixtureRequest, sparks: Sparks, folder: Callable[[], Path]) -> Iterator["Ahead"]:
    """Spark, and what is analysed on it before a test asks for it; only what some test will ask for."""
    from tests.correlation.ahead import Ahead

    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    with Ahead.begun(sparks, folder, NOW, asked) as ahead:
        yield ahead


@pytest.fixture(scope="session")
def starting(ahead: "Ahead") -> "Future[SparkSession]":
    """Spark, which takes some seconds: for who has something else to start meanwhile. Everybody else asks for `spark`."""
    return ahead.spark


@pytest.fixture(scope="session")
def spark(starting: "Future[SparkSession]") -> "SparkSession":
    return starting.result()


@pytest.fixture(scope="session")
def analyse(starting: "Future[SparkSession]", folder: Callable[[], Path]) -> "Analyse":
    """Analyses rows, or what lies in a folder."""
    from tests.correlation.analysed import Analyse

    return Analyse(starting.result, folder, NOW)


@pytest.fixture(scope="session")
def mixed(ahead: "Ahead") -> "Mixed":
    """A log with everything that can go wrong with one."""
    return ahead.mixed.result()


@pytest.fixture(scope="session")
def whole(ahead: "Ahead") -> "Analysed":
    """That one, analysed at once on a small cluster."""
    return ahead.whole.result()


@pytest.fixture(scope="session")
def by_halves(ahead: "Ahead") -> "Analysed":
    """The same log, come in by halves and analysed each time, without a cluster."""
    return ahead.by_halves.result()


@pytest.fixture(scope="session")
def sharing(ahead: "Ahead") -> "Planted":
    """A log in which hosts are out, and with them all that share one."""
    return ahead.sharing.result()


@pytest.fixture(scope="session")
def together(ahead: "Ahead") -> "Analysed":
    """That one, analysed."""
    return ahead.together.result()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes new ones."""
    return lambda: tmp_path_factory.mktemp("analysis")
