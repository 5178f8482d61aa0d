"""Programs that are fetched by their Maven coordinates, each once for a machine's user.

Under ROOMS_CACHE (else XDG_CACHE_HOME/rooms, else ~/.cache/rooms) a folder each. It gets its name when it is whole, and
whoever fetches holds a lock: two processes never fight, and one that was killed half-way leaves nothing that counts.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rooms.embedded.errors import FetchError
from rooms.embedded.java import find_maven

_TIMEOUT_S = 900
_LAST_LINES = 15
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
_DEPENDENCY = "    <dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version><type>{}</type>{}</dependency>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """What Maven calls one file: `group:name:version`, and where it is no jar, its type and classifier."""

    group: str
    name: str
    version: str
    type: str = "jar"
    classifier: str | None = None

    def dependency(self) -> str:
        classifier = "" if self.classifier is None else f"<classifier>{self.classifier}</classifier>"
        return _DEPENDENCY.format(self.group, self.name, self.version, self.type, classifier)


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A program: the folder that it gets in the cache, what it is made of, and whether archives are opened there."""

    folder: str
    artifacts: Sequence[Artifact]
    unpacked: bool = False


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where fetched programs are kept."""
    if own := environment.get("ROOMS_CACHE"):
        return Path(own).absolute()
    shared = environment.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache").absolute() / "rooms"


def fetch(cache: Path, package: Package, environment: Mapping[str, str] = os.environ) -> Path:
    """The package's folder, fetched when it is missing. Blocks, on a slow line for minutes.

    Raises MissingError without Maven, and FetchError with the end of what Maven said.
    """
    folder = cache / package.folder
    if folder.is_dir():
        return folder
    maven = find_maven(environment)
    cache.mkdir(mode=0o755, parents=True, exist_ok=True)
    with _lock(cache / f".{package.folder}.lock"):
        # Another process may have been at it while we waited.
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(prefix=f".{package.folder}.", dir=cache) as work:
                _run(maven, package, Path(work), environment)
                (Path(work) / "whole").rename(folder)
    return folder


def _run(maven: Path, package: Package, work: Path, environment: Mapping[str, str]) -> None:
    dependencies = "\n".join(artifact.dependency() for artifact in package.artifacts)
    (work / "pom.xml").write_text(_POM.format(name=package.folder, dependencies=dependencies))
    goal = "dependency:unpack-dependencies" if package.unpacked else "dependency:copy-dependencies"
    limits = ["-DexcludeTransitive=true"] if package.unpacked else []
    command = [str(maven), "-q", "-B", goal, "-DoutputDirectory=whole", *limits]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=work, env=dict(environment), timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as exc:
        raise FetchError(
            f"{package.folder} was not there after {_TIMEOUT_S} s: is Maven's repository reachable?"
        ) from exc
    if done.returncode != 0 or not (work / "whole").is_dir():
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_LAST_LINES:])
        raise FetchError(f"Maven could not fetch {package.folder}:\n{said}")
    for header in (work / "whole").glob("PaxHeaders*"):
        shutil.rmtree(header)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
