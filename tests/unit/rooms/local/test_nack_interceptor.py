"""Test how the broker's interceptor is compiled, and that everything names the same class."""

import re
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Final

import pytest

from delivery.brokers.artemis import users
from rooms.local import FetchError, MissingError
from rooms.local.java_servers import BROKER_XML
from rooms.local.nack_interceptor import SOURCE, compile_interceptor
from tests.support.service import ROOT

# It finds the folder of the classes as the compiler does, and counts its calls.
_COMPILER: Final = """
echo . >> "$0.count"
while [ "$1" != -d ]; do shift; done
mkdir -p "$2/rooms" && echo compiled > "$2/rooms/NackInterceptor.class"
"""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return the folder of fetched programs, which exists once the broker is fetched."""
    (tmp_path / "cache/lib").mkdir(parents=True)
    (tmp_path / "cache/lib/broker.jar").touch()
    return tmp_path / "cache"


def java(folder: Path, script: str) -> Path:
    path = folder / "java"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def left(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_compiled_interceptor_is_not_compiled_again(cache: Path, tmp_path: Path) -> None:
    compiler = java(tmp_path, _COMPILER)
    jar = compile_interceptor(cache, compiler, cache / "lib")
    assert compile_interceptor(cache, compiler, cache / "lib") == jar
    assert compile_interceptor(cache, tmp_path / "no-java", cache / "lib") == jar
    assert (tmp_path / "java.count").read_text() == ".\n"
    assert left(cache) == [".nack-interceptor.lock", "lib", jar.name]


def test_each_version_of_the_broker_has_an_interceptor_of_its_own(
    cache: Path, tmp_path: Path
) -> None:
    compiler = java(tmp_path, _COMPILER)
    (cache / "newer").mkdir()
    jars = {compile_interceptor(cache, compiler, cache / name) for name in ("lib", "newer")}
    assert len(jars) == 2


def test_java_without_a_compiler_is_reported_with_advice(cache: Path, tmp_path: Path) -> None:
    jre = java(
        tmp_path, "echo 'java.lang.module.FindException: Module jdk.compiler not found'; exit 1"
    )
    with pytest.raises(
        MissingError,
        match=r"needs a JDK 17 or later, and .*/java has no compiler: .*default-jdk-headless",
    ):
        compile_interceptor(cache, jre, cache / "lib")
    assert left(cache) == [".nack-interceptor.lock", "lib"]


def test_failed_compilation_shows_the_output_and_leaves_nothing(
    cache: Path, tmp_path: Path
) -> None:
    compiler = java(tmp_path, "echo 'NackInterceptor.java:1: error: no such class' >&2; exit 1")
    with pytest.raises(
        FetchError, match=r"could not be compiled for the broker:\nNackInterceptor.java:1: error"
    ):
        compile_interceptor(cache, compiler, cache / "lib")
    assert left(cache) == [".nack-interceptor.lock", "lib"]


def test_broker_settings_and_doctor_name_the_class_of_the_source() -> None:
    """A broker does not start without a class that its settings name."""
    text = SOURCE.read_text()
    (package,) = re.findall(r"^package ([a-z.]+);$", text, re.MULTILINE)
    (name,) = re.findall(r"^public final class (\w+) ", text, re.MULTILINE)
    named = ET.parse(BROKER_XML).getroot().iter("{urn:activemq:core}class-name")
    assert [element.text for element in named] == [f"{package}.{name}"]
    assert f"{package}.{name}" == users._NACK_INTERCEPTOR
    assert SOURCE.stem == name


def test_installed_package_has_the_source() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["*"]
    assert {f"*{path.suffix}" for path in (SOURCE, BROKER_XML)} <= set(patterns)
