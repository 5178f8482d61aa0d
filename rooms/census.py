"""The gauges of processes that are gone: a killed one cannot take its own back, and they would be told for ever."""

import os
import re
from pathlib import Path
from typing import Final

_LIVE: Final = re.compile(r"gauge_live[a-z]*_(\d+)\.db")


def forget_dead(folder: Path) -> None:
    """Remove what PROMETHEUS_MULTIPROC_DIR has of live gauges of processes that are none any more.

    Counters stay: what was counted is counted. The folder is of one machine (and process namespace), as its processes are.
    """
    for path in folder.glob("gauge_live*_*.db"):
        match = _LIVE.fullmatch(path.name)
        if match is not None and not _lives(int(match[1])):
            # Another scrape may be doing the same.
            path.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
