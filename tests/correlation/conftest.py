"""One Spark for all tests of the analysis; without Java they are skipped on a desk and fail in CI."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.correlation.sparks import CLUSTER, HERE, Sparks, environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.correlation.analysed import Analyse

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
    sparks = Sparks()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(tmp_path_factory.mktemp("spark")).items():
            patch.setenv(name, value)
        yield sparks
        sparks.close()


@pytest.fixture(scope="module")
def starting(sparks: Sparks) -> Iterator["Future[SparkSession]"]:
    """Spark, which takes some seconds: for who has something else to start meanwhile. Everybody else asks for `spark`."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(sparks.at, HERE)


@pytest.fixture(scope="module")
def spark(starting: "Future[SparkSession]") -> "SparkSession":
    return starting.result()


@pytest.fixture(scope="session")
def analyse(sparks: Sparks, folder: Callable[[], Path]) -> "Analyse":
    """Analyses rows, or what lies in a folder."""
    from tests.correlation.analysed import Analyse

    return Analyse(lambda: sparks.at(HERE), folder, NOW)


@pytest.fixture(scope="session")
def analyse_on_cluster(sparks: Sparks, folder: Callable[[], Path]) -> "Analyse":
    """The same, on a small cluster."""
    from tests.correlation.analysed import Analyse

    return Analyse(lambda: sparks.at(CLUSTER), folder, NOW)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes new ones."""
    return lambda: tmp_path_factory.mktemp("analysis")
