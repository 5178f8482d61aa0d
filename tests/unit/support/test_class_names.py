"""Test the check of class names, and check those of the source."""

import pytest

from tests.support.class_names import main, repeated_names


def test_a_name_of_two_classes_is_reported_with_its_places() -> None:
    sources = [("a.py", "class A: ...\n\nclass B: ..."), ("b.py", "def f():\n    class A: ...")]
    assert list(repeated_names(sources)) == ["class A is defined 2 times: a.py:1, b.py:2"]


def test_no_two_classes_of_the_source_have_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0, capsys.readouterr().out
