"""Programs of Debian packages: named by a variable, else on PATH, else fetched once from the package.

A package is unpacked into ROOMS_CACHE and not installed, so that no service of it starts.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from rooms.local.maven import cache_dir
from tests.support.servers import unavailable

_TIMEOUT_S: Final = 300


def debian_program(name: str, *, package: str, path: str, variable: str) -> Path:
    """Return the program at `path` of a package. Where it cannot be had, the test is skipped; in CI it fails."""
    if given := os.environ.get(variable):
        return Path(given)
    if found := shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin"):
        return Path(found)
    cached = cache_dir() / name
    if not cached.exists():
        _fetch(cached, package, path, variable)
    return cached


def _fetch(target: Path, package: str, path: str, variable: str) -> None:
    name = target.name
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        unavailable(f"{name} is missing: install {package}, or name the program in {variable}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        folder = Path(temporary)
        folder.chmod(0o755)  # apt-get downloads as a user of its own
        try:
            _run(["apt-get", "download", "--quiet", package], folder)
            (found,) = folder.glob("*.deb")
            _run(["dpkg-deb", "--extract", found.name, "unpacked"], folder)
        except (subprocess.SubprocessError, ValueError) as exc:
            unavailable(
                f"{name} cannot be fetched ({exc}); run `apt-get update`, or name it in {variable}"
            )
        # Only a file that is whole gets the name.
        (folder / "unpacked" / path).rename(target)


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=_TIMEOUT_S)
