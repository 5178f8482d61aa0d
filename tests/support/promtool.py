"""Prometheus' own checker of rules: named by ROOMS_PROMTOOL, else on PATH, else fetched once from Debian's package.

The package is unpacked into ROOMS_CACHE and not installed, so that no Prometheus starts.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from rooms.local.maven import cache_dir
from tests.support.servers import unavailable

_PACKAGE: Final = "prometheus"
_TIMEOUT_S: Final = 300


def promtool() -> Path:
    """Return the program. Where it cannot be had, the test is skipped; in CI it fails."""
    if given := os.environ.get("ROOMS_PROMTOOL"):
        return Path(given)
    if found := shutil.which("promtool"):
        return Path(found)
    cached = cache_dir() / "promtool"
    if not cached.exists():
        _fetch(cached)
    return cached


def _fetch(target: Path) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        unavailable("promtool is missing: install Prometheus, or name promtool in ROOMS_PROMTOOL")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        folder.chmod(0o755)  # apt-get downloads as a user of its own
        try:
            _run(["apt-get", "download", "--quiet", _PACKAGE], folder)
            (package,) = folder.glob("*.deb")
            _run(["dpkg-deb", "--extract", package.name, "unpacked"], folder)
        except (subprocess.SubprocessError, ValueError) as exc:
            unavailable(
                f"promtool cannot be fetched ({exc}); run `apt-get update`, or name it in ROOMS_PROMTOOL"
            )
        # Only a file that is whole gets the name.
        (folder / "unpacked/usr/bin/promtool").rename(target)


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=_TIMEOUT_S)
