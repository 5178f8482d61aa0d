"""Run Rooms on one machine: embedded servers, and the supervisor that keeps each process alive.

    supervisor ──┬── postgres          only without DATABASE_URL; unix socket, no TCP
                 ├── rooms serve
                 ├── rooms worker
                 └── rooms upkeep

| what dies | what happens |
| --- | --- |
| a child, PostgreSQL included | restarted at once, then after a delay that grows to 1 s |
| the supervisor, by SIGINT, SIGTERM or SIGHUP | children drain in order, then PostgreSQL stops |
| the supervisor, by SIGKILL | the kernel ends the children; outside Linux, the next start does |
| the machine | the next start removes stale pid files, sockets and shared memory |

Artemis and ZooKeeper are servers beside PostgreSQL (`java_servers.py`). `services.py` runs all
three for `rooms full`.

Folders under ROOMS_DATA: `postgres/` holds the database, `socket/` its socket, `run/` the lock and
pid files, `log/` one file for each process.
"""

from rooms.local.child_process import Child, http_ready
from rooms.local.errors import (
    DataInUseError,
    EmbeddedError,
    FetchError,
    IdentityError,
    InitialisationError,
    MissingError,
    StartError,
)
from rooms.local.postgres import EmbeddedPostgres, embedded_url
from rooms.local.supervisor import Started, Supervisor

__all__ = [
    "Child",
    "DataInUseError",
    "EmbeddedError",
    "EmbeddedPostgres",
    "FetchError",
    "IdentityError",
    "InitialisationError",
    "MissingError",
    "StartError",
    "Started",
    "Supervisor",
    "embedded_url",
    "http_ready",
]
