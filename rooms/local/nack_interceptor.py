"""Compile the broker's interceptor that keeps what STOMP clients reject, `NackInterceptor.java`.

It is compiled against the libraries of the broker that runs it, once for each of its versions.
"""

import hashlib
import os
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from rooms.local.errors import FetchError, MissingError
from rooms.local.maven import INSTALL_HINT, MIN_JAVA, locked

SOURCE: Final = Path(__file__).with_name("NackInterceptor.java")
_COMPILER: Final = "jdk.compiler"
_TIMEOUT_S: Final = 120


def compile_interceptor(cache: Path, java: Path, libraries: Path) -> Path:
    """Return a jar with the interceptor for the broker whose jars are in `libraries`.

    Raises MissingError if this Java has no compiler, and FetchError with its output if it fails.
    """
    source = SOURCE.read_bytes()
    version = hashlib.sha256(b"%b\0%b" % (source, str(libraries).encode())).hexdigest()[:12]
    jar = cache / f"nack-interceptor-{version}.jar"
    if jar.is_file():
        return jar
    with (
        locked(cache / ".nack-interceptor.lock"),
        tempfile.TemporaryDirectory(prefix=".nack-interceptor.", dir=cache) as folder,
    ):
        # Another process may have compiled it while this one waited for the lock.
        if not jar.is_file():
            work = Path(folder)
            _compile(java, libraries, work / "classes")
            with zipfile.ZipFile(work / jar.name, "w") as archive:
                for path in sorted((work / "classes").rglob("*.class")):
                    archive.write(path, path.relative_to(work / "classes"))
            (work / jar.name).rename(jar)
    return jar


def _compile(java: Path, libraries: Path, classes: Path) -> None:
    command: list[str | Path] = [
        *(java, "-m", f"{_COMPILER}/com.sun.tools.javac.Main"),
        *("--release", str(MIN_JAVA), "-proc:none", "-nowarn", "-d", classes),
        *("-classpath", os.pathsep.join(map(str, sorted(libraries.glob("*.jar")))), SOURCE),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode == 0:
        return
    output = (done.stdout + done.stderr).strip()
    if f"{_COMPILER} not found" in output:
        raise MissingError(
            f"Artemis needs a JDK {MIN_JAVA} or later, and {java} has no compiler: {INSTALL_HINT}"
        )
    raise FetchError(f"{SOURCE.name} could not be compiled for the broker:\n{output}")
