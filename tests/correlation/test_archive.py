"""The archive of Java's classes: whole or not there, for one Java and its jars, and never in anybody's way."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from delivery.correlation.archive import archive_options, make
from delivery.correlation.java import find_java

_SIZE = 100


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Java that does nothing, and a Spark of two jars."""
    spark, java = tmp_path / "spark", tmp_path / "java"
    for file in (spark / "jars" / "a.jar", spark / "jars" / "b.jar", java / "bin" / "java", java / "release"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.name)
    monkeypatch.setenv("SPARK_HOME", str(spark))
    return java


def _train(folder: Path) -> Path:
    made = folder / "classes"
    made.write_bytes(bytes(_SIZE))
    return made


def test_what_was_made_is_used(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "some where" / "share"
    assert archive_options(home, folder) == ""
    made = make(home, folder, train=_train)
    assert made is not None
    assert made.read_bytes() == bytes(_SIZE)
    assert shlex.split(archive_options(home, folder))[-1] == f"-XX:SharedArchiveFile={made}"
    assert list(folder.iterdir()) == [made]


def test_it_is_made_once(home: Path, tmp_path: Path) -> None:
    made = make(home, tmp_path, train=_train)
    assert make(home, tmp_path, train=lambda _: pytest.fail("it is there")) == made


@pytest.mark.parametrize("changed", ["java/release", "spark/jars/b.jar"])
def test_it_is_for_one_java_and_the_jars_as_they_are(home: Path, tmp_path: Path, changed: str) -> None:
    folder = tmp_path / "share"
    old = make(home, folder, train=_train)
    (tmp_path / changed).write_text("another one")
    assert archive_options(home, folder) == ""
    new = make(home, folder, train=_train)
    assert new is not None
    assert new != old
    assert list(folder.iterdir()) == [new]


def test_one_that_was_cut_short_is_none(home: Path, tmp_path: Path) -> None:
    made = make(home, tmp_path / "share", train=_train)
    assert made is not None
    os.truncate(made, _SIZE - 1)
    assert archive_options(home, tmp_path / "share") == ""
    assert make(home, tmp_path / "share", train=_train) == made
    assert made.stat().st_size == _SIZE


def test_a_java_that_makes_none_leaves_nothing(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "share"
    assert make(home, folder, train=lambda making: making / "classes") is None
    assert list(folder.iterdir()) == []


def test_without_spark_nothing_is_tried(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "nowhere"))
    assert make(home, tmp_path / "share", train=lambda _: pytest.fail("there is no Spark")) is None


@pytest.mark.usefixtures("java")
def test_java_passes_over_one_that_does_not_fit_in_silence(tmp_path: Path) -> None:
    home = find_java()
    made = make(home, tmp_path, train=_train)
    assert made is not None
    java = "java" if home is None else home / "bin" / "java"
    options = shlex.split(archive_options(home, tmp_path))
    told = subprocess.run([java, *options, "-version"], capture_output=True, text=True, check=True)
    assert told.stdout == ""
    assert str(made) not in told.stderr
