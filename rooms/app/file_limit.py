"""Share the files that the system allows a process among its parts."""

import logging
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_log = logging.getLogger(__name__)

_MIN_CONNECTIONS: Final = 2
_FEW_CONNECTIONS: Final = 64


@dataclass(frozen=True, slots=True)
class FileNeed:
    """State how many connections a part wants, and how many files it needs beside them.

    A part that does not run wants none.
    """

    connections: int
    spare: int


def allot_connections(*needs: FileNeed) -> Sequence[int]:
    """Raise the file limit for all parts of this process, and return the connections of each.

    Where the system allows fewer, each part gets as large a fraction of what it wants.
    """
    spare = sum(need.spare for need in needs)
    wanted = sum(need.connections for need in needs)
    allowed = max(0, min(wanted, raise_file_limit(wanted + spare) - spare))
    found = [
        max(_MIN_CONNECTIONS, need.connections * allowed // wanted) if need.connections else 0
        for need in needs
    ]
    if any(
        one < min(_FEW_CONNECTIONS, need.connections)
        for one, need in zip(found, needs, strict=True)
    ):
        _log.warning(
            "the system allows so few files that parts of this process have %s connections each:"
            " raise the limit (`ulimit -Hn`) to %d",
            " and ".join(str(one) for one in found if one),
            wanted + spare,
        )
    return found


def raise_file_limit(wanted: int) -> int:
    """Raise this process's file limit as far as allowed, and return how many files it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
