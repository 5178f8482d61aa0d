"""Test the keys against the published values of XXH64, computed by Spark 4 with its seed."""

import pytest

from delivery.analytics.local.keys import text_key


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", -7444071767201028348),
        ("abc", 1423657621850124518),
        ("Spark", -4294468057691064905),
    ],
)
def test_keys_are_those_of_spark(text: str, key: int) -> None:
    assert text_key(text) == key
