"""Where the counts of several processes lie: in memory, where the system has a folder there. They are written through mapped
pages, and one that a full file system has no block for ends its process by SIGBUS, whatever it was doing.
"""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Final

from rooms.cli.errors import CliError

MEMORY: Final = Path("/dev/shm")  # noqa: S108 - what is made there is 0700 and checked


def counts_folder(data: Path, memory: Path = MEMORY) -> Path:
    """By a name that depends on the data folder alone, so that the next start removes what a killed one left."""
    if not (memory.is_dir() and os.access(memory, os.W_OK | os.X_OK)):
        return data / "run" / "metrics"
    name = hashlib.sha256(os.fsencode(data.absolute())).hexdigest()[:16]
    return memory / f"rooms-metrics-{os.geteuid()}-{name}"


def lay_out(folder: Path) -> None:
    """Make it anew: counts of processes that are gone would be added to those of the new ones for ever."""
    clear(folder)
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError as exc:
        raise CliError(f"{folder} is not ours: remove it, or choose another ROOMS_DATA") from exc


def clear(folder: Path) -> None:
    """Remove it, if it is there."""
    shutil.rmtree(folder, ignore_errors=True)
