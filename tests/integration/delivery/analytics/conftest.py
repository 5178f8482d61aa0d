"""Share one Spark between all tests of the analysis; without Java they are skipped, and fail in CI."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.spark_sessions import Sparks, environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.analysis_logs import Mixed
    from tests.support.analysis_run import Analyse, Analysed
    from tests.support.planted_outages import Planted
    from tests.support.prepared_analyses import Ahead

NOW = datetime(2026, 1, 9, tzinfo=UTC)


@pytest.fixture(scope="session", autouse=True)
def one_salt() -> Iterator[None]:
    """Give all states the same keys, as their order decides ties in results that are compared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("delivery.analytics.runs.manifest.new_salt", lambda: "5a" * 16)
        yield


@pytest.fixture(scope="session")
def java() -> None:
    """Require Java, of the system or of a wheel."""
    from delivery.analytics.runs.errors import NoJavaError
    from delivery.analytics.spark.session import find_java

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
def ahead(
    request: pytest.FixtureRequest, sparks: Sparks, folder: Callable[[], Path]
) -> Iterator["Ahead"]:
    """Start Spark, and the analyses that the collected tests use."""
    from tests.support.prepared_analyses import Ahead

    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    with Ahead.begun(sparks, folder, NOW, asked) as ahead:
        yield ahead


@pytest.fixture(scope="session")
def starting(ahead: "Ahead") -> "Future[SparkSession]":
    """Return Spark as a future, for tests that start something else at the same time."""
    return ahead.spark


@pytest.fixture(scope="session")
def spark(starting: "Future[SparkSession]") -> "SparkSession":
    return starting.result()


@pytest.fixture(scope="session")
def analyse(starting: "Future[SparkSession]", folder: Callable[[], Path]) -> "Analyse":
    """Return a function that analyses rows or a folder."""
    from tests.support.analysis_run import Analyse

    return Analyse(starting.result, folder, NOW)


@pytest.fixture(scope="session")
def mixed(ahead: "Ahead") -> "Mixed":
    """Return a log with every kind of fault."""
    return ahead.mixed.result()


@pytest.fixture(scope="session")
def whole(ahead: "Ahead") -> "Analysed":
    """Analyse the mixed log at once on a small cluster."""
    return ahead.whole.result()


@pytest.fixture(scope="session")
def by_halves(ahead: "Ahead") -> "Analysed":
    """Analyse the mixed log in two halves, without a cluster."""
    return ahead.by_halves.result()


@pytest.fixture(scope="session")
def sharing(ahead: "Ahead") -> "Planted":
    """Return a log with outages of shared hosts."""
    return ahead.sharing.result()


@pytest.fixture(scope="session")
def together(ahead: "Ahead") -> "Analysed":
    """Analyse the log with outages of shared hosts."""
    return ahead.together.result()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Return a function that makes new folders."""
    return lambda: tmp_path_factory.mktemp("analysis")
