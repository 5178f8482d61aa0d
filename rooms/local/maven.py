"""Find Java and Maven, and fetch programs by their Maven coordinates, once per user.

Packages are cached in ROOMS_CACHE, or else in XDG_CACHE_HOME/rooms or ~/.cache/rooms. A package
gets its name there only when it is complete, under a lock. Processes never conflict, and an
interrupted fetch leaves nothing behind.
"""

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rooms.local.errors import FetchError, MissingError

MIN_JAVA = 17
INSTALL_HINT = (
    "on Debian and Ubuntu `apt install default-jdk-headless maven`, "
    "on Fedora `dnf install java-21-openjdk-devel maven`, "
    "on macOS `brew install openjdk maven`"
)
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_JAVA_TIMEOUT_S = 60
# Fast start and little memory: one compiler, one collector, Java's own class archive.
FAST_START_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
_MAVEN_TIMEOUT_S = 900
_ERROR_LINES = 15
_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>rooms</groupId>
  <artifactId>{name}</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
{dependencies}
  </dependencies>
</project>
"""
_DEPENDENCY = (
    "    <dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>"
    "<type>{}</type>{}</dependency>"
)


def find_java(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of `java`, from JAVA_HOME or PATH.

    Raises MissingError with installation advice if there is none, or if it is too old.
    """
    home = environment.get("JAVA_HOME")
    found = shutil.which(
        "java", path=f"{home}/bin" if home else environment.get("PATH", os.defpath)
    )
    if found is None:
        where = f"JAVA_HOME ({home})" if home else "PATH"
        raise MissingError(
            f"Artemis and ZooKeeper need Java {MIN_JAVA} or later, and {where} has no java: "
            f"{INSTALL_HINT}"
        )
    answer = subprocess.run(
        [found, "-version"], check=False, capture_output=True, text=True, timeout=_JAVA_TIMEOUT_S
    )
    output = answer.stderr + answer.stdout
    version = _VERSION.search(output)
    if version is None or int(version[1]) < MIN_JAVA:
        version_line = (
            output.strip().partition("\n")[0] or f"nothing (exit code {answer.returncode})"
        )
        raise MissingError(
            f"Artemis and ZooKeeper need Java {MIN_JAVA} or later, and {found} says: "
            f"{version_line}. Install a newer one: {INSTALL_HINT}"
        )
    return Path(found).absolute()


def find_maven(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of `mvn`. Raise MissingError with installation advice if there is none."""
    if (found := shutil.which("mvn", path=environment.get("PATH", os.defpath))) is None:
        raise MissingError(
            f"Artemis and ZooKeeper are fetched by Maven, and PATH has no mvn: {INSTALL_HINT}"
        )
    return Path(found).absolute()


@dataclass(frozen=True, slots=True, kw_only=True)
class MavenArtifact:
    """Name one file in a Maven repository."""

    group: str
    name: str
    version: str
    type: str = "jar"
    classifier: str | None = None

    def to_dependency(self) -> str:
        classifier = (
            "" if self.classifier is None else f"<classifier>{self.classifier}</classifier>"
        )
        return _DEPENDENCY.format(self.group, self.name, self.version, self.type, classifier)


@dataclass(frozen=True, slots=True, kw_only=True)
class MavenPackage:
    """Describe a program: its folder in the cache, and its artifacts, unpacked or not."""

    folder: str
    artifacts: Sequence[MavenArtifact]
    unpacked: bool = False


def cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of fetched programs."""
    if own := environment.get("ROOMS_CACHE"):
        return Path(own).absolute()
    shared = environment.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache").absolute() / "rooms"


def fetch_package(
    cache: Path, package: MavenPackage, environment: Mapping[str, str] = os.environ
) -> Path:
    """Return the folder of the package, and fetch it if it is missing. May block for minutes.

    Raises MissingError without Maven, and FetchError with the end of Maven's output.
    """
    folder = cache / package.folder
    if folder.is_dir():
        return folder
    maven = find_maven(environment)
    cache.mkdir(mode=0o755, parents=True, exist_ok=True)
    with locked(cache / f".{package.folder}.lock"):
        # Another process may have fetched it while this one waited for the lock.
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(prefix=f".{package.folder}.", dir=cache) as work:
                _run_maven(maven, package, Path(work), environment)
                (Path(work) / "whole").rename(folder)
    return folder


def _run_maven(
    maven: Path, package: MavenPackage, work: Path, environment: Mapping[str, str]
) -> None:
    dependencies = "\n".join(artifact.to_dependency() for artifact in package.artifacts)
    (work / "pom.xml").write_text(_POM.format(name=package.folder, dependencies=dependencies))
    goal = "dependency:unpack-dependencies" if package.unpacked else "dependency:copy-dependencies"
    limits = ["-DexcludeTransitive=true"] if package.unpacked else []
    command = [str(maven), "-q", "-B", goal, "-DoutputDirectory=whole", *limits]
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            cwd=work,
            env=dict(environment),
            timeout=_MAVEN_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as exc:
        raise FetchError(
            f"{package.folder} was not fetched within {_MAVEN_TIMEOUT_S} s: "
            "is Maven's repository reachable?"
        ) from exc
    if done.returncode != 0 or not (work / "whole").is_dir():
        output = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_ERROR_LINES:])
        raise FetchError(f"Maven could not fetch {package.folder}:\n{output}")
    for header in (work / "whole").glob("PaxHeaders*"):
        shutil.rmtree(header)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of this file, which is created if it is missing."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
