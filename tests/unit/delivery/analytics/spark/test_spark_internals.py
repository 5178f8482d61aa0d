"""Check what the analysis assumes of the internals of PySpark, so that an upgrade fails here by name."""

import pytest
from pyspark import SparkContext
from pyspark.java_gateway import launch_gateway

from delivery.analytics.spark.spark_internals import ASSUMED
from tests.support.assumed_names import names_of, parameters

MODULE = "delivery/analytics/spark/spark_internals.py"


@pytest.mark.parametrize("kind", ASSUMED, ids=lambda kind: kind.__name__)
def test_pyspark_has_the_names_that_are_used(kind: type) -> None:
    missing = ASSUMED[kind] - names_of(kind)
    assert not missing, (
        f"PySpark's {kind.__name__} has no {', '.join(sorted(missing))} any more: adapt {MODULE}"
    )


@pytest.mark.parametrize(
    ("function", "taken"),
    [
        pytest.param(launch_gateway, ["conf", "popen_kwargs"], id="launch_gateway"),
        pytest.param(
            SparkContext._ensure_initialized,
            ["instance", "gateway", "conf"],
            id="_ensure_initialized",
        ),
    ],
)
def test_pyspark_starts_its_jvm_with_the_arguments_that_are_passed(
    function: object, taken: list[str]
) -> None:
    assert parameters(function) == taken, f"it takes other arguments: adapt {MODULE}"
