"""The settings that the embedded PostgreSQL runs with."""

import os
from collections.abc import Mapping
from pathlib import Path

from rooms.embedded.binaries import Binaries

_MIB = 1024 * 1024
_STATEMENTS = "pg_stat_statements"


def settings(binaries: Binaries, memory_bytes: int) -> Mapping[str, str]:
    """Every setting by name, for a machine with so much memory. Durability is never traded for speed."""
    shared_mib = max(32, min(256, memory_bytes // _MIB // 8))
    chosen = {
        "fsync": "on",
        "full_page_writes": "on",
        "synchronous_commit": "on",
        "max_connections": "200",
        "shared_buffers": f"{shared_mib}MB",
        "wal_buffers": "16MB",
        "wal_compression": "off",
        "max_wal_size": "1GB",
        "checkpoint_timeout": "5min",
        "checkpoint_completion_target": "0.9",
        "autovacuum_naptime": "5s",
        "jit": "off",
        "track_io_timing": "off",
        "timezone": "UTC",
        "log_timezone": "UTC",
        "log_min_messages": "warning",
        "log_checkpoints": "off",
        "log_line_prefix": "%m [%p] ",
        # A statement in the log may hold a payload.
        "log_min_error_statement": "panic",
        "unix_socket_permissions": "0700",
        "cluster_name": "rooms",
    }
    if binaries.ships(_STATEMENTS):
        chosen["shared_preload_libraries"] = _STATEMENTS
    return chosen


def rendered(chosen: Mapping[str, str]) -> str:
    """The settings as a file that PostgreSQL includes."""
    lines = [f"{name} = '{value}'" for name, value in chosen.items()]
    return "\n".join(["# Written at every start. ALTER SYSTEM wins over it.", *lines, ""])


def memory_bytes() -> int:
    """What this machine, or the container we are in, has."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdecimal() else machine
