"""A file system of its own in memory, small enough to be filled."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_CHUNKS: Final = (8 * 1024 * 1024, 1024 * 1024, 4096)


class CannotMountError(Exception):
    """This process may not mount a file system: that takes root with CAP_SYS_ADMIN."""


@contextmanager
def mounted(folder: Path, *, mib: int, mode: str = "0700") -> Iterator[Path]:
    """Mount a file system of `mib` at a new folder. CannotMountError where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode={mode}", "rooms-test", str(folder)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError as missing:
        raise CannotMountError(str(missing)) from missing
    if done.returncode:
        raise CannotMountError(f"it takes root with CAP_SYS_ADMIN: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        # Lazily: a process that is not quite gone must not leave it there.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave not a block of its file system free; the file to remove afterwards."""
    path = folder / "filling"
    with path.open("wb") as file:
        for chunk in _CHUNKS:
            try:
                while True:
                    os.posix_fallocate(file.fileno(), file.tell(), chunk)
                    file.seek(chunk, os.SEEK_CUR)
            except OSError:
                continue
    return path
