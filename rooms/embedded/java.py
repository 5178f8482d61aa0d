"""The Java and the Maven of this machine: Artemis and ZooKeeper need the first to run, and the second once, to be fetched."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from rooms.embedded.errors import MissingError

OLDEST_JAVA = 17
INSTALL = (
    "on Debian and Ubuntu `apt install default-jre-headless maven`, on Fedora `dnf install java-21-openjdk-headless maven`, "
    "on macOS `brew install openjdk maven`"
)
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_TIMEOUT_S = 60
# Short lives and small machines: one compiler, one collector, classes from the archive that Java brings.
QUICK = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")


def find_java(environment: Mapping[str, str] = os.environ) -> Path:
    """The program `java`, from JAVA_HOME or PATH.

    Raises MissingError, with the way to get it, when there is none or it is too old.
    """
    home = environment.get("JAVA_HOME")
    found = shutil.which("java", path=f"{home}/bin" if home else environment.get("PATH", os.defpath))
    if found is None:
        where = f"JAVA_HOME ({home})" if home else "PATH"
        raise MissingError(
            f"Artemis and ZooKeeper need Java {OLDEST_JAVA} or later, and {where} has no java: {INSTALL}"
        )
    answer = subprocess.run([found, "-version"], check=False, capture_output=True, text=True, timeout=_TIMEOUT_S)
    said = answer.stderr + answer.stdout
    version = _VERSION.search(said)
    if version is None or int(version[1]) < OLDEST_JAVA:
        told = said.strip().partition("\n")[0] or f"nothing, and ended with code {answer.returncode}"
        raise MissingError(
            f"Artemis and ZooKeeper need Java {OLDEST_JAVA} or later, and {found} says: {told}. Newer: {INSTALL}"
        )
    return Path(found).absolute()


def find_maven(environment: Mapping[str, str] = os.environ) -> Path:
    """The program `mvn`. Raises MissingError, with the way to get it, when there is none."""
    if (found := shutil.which("mvn", path=environment.get("PATH", os.defpath))) is None:
        raise MissingError(f"Artemis and ZooKeeper are fetched by Maven, and PATH has no mvn: {INSTALL}")
    return Path(found).absolute()
