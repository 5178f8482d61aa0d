"""One machine's Rooms: its own PostgreSQL, and the supervisor that keeps every process alive.

    supervisor ──┬── postgres          only when no DATABASE_URL is given; unix socket, no TCP
                 ├── rooms serve
                 ├── rooms worker
                 └── rooms upkeep

| what dies | what happens |
| --- | --- |
| a child, PostgreSQL included | started again at once, then after a pause that grows to 1 s |
| the supervisor, by SIGINT, SIGTERM or SIGHUP | children drain in their order, then PostgreSQL stops fast |
| the supervisor, by SIGKILL | the kernel ends the children (Linux); elsewhere the next start does, by the files in `run/` |
| the machine | the next start recovers: stale pid files, sockets and shared memory are recognised |

Artemis and ZooKeeper stand beside PostgreSQL as servers of the same kind (`artemis.py`, `zookeeper.py`); `services.py` is all three
for `rooms full`, `running.py` one of them for the length of a test.

Under ROOMS_DATA: `postgres/` the records, `socket/` the way to them, `run/` the lock and pid files, `log/` a file a process.
"""

from rooms.embedded.errors import (
    DataInUseError,
    EmbeddedError,
    FetchError,
    IdentityError,
    InitialisationError,
    MissingError,
    StartError,
)
from rooms.embedded.keeper import Child
from rooms.embedded.readiness import http_ready
from rooms.embedded.running import (
    Running,
    own_artemis,
    own_zookeeper,
    running,
    temporary_artemis,
    temporary_zookeeper,
)
from rooms.embedded.server import EmbeddedPostgres, embedded_url
from rooms.embedded.supervisor import Started, Supervisor
from rooms.embedded.temporary import temporary_postgres

__all__ = [
    "Child",
    "DataInUseError",
    "EmbeddedError",
    "EmbeddedPostgres",
    "FetchError",
    "IdentityError",
    "InitialisationError",
    "MissingError",
    "Running",
    "StartError",
    "Started",
    "Supervisor",
    "embedded_url",
    "http_ready",
    "own_artemis",
    "own_zookeeper",
    "running",
    "temporary_artemis",
    "temporary_postgres",
    "temporary_zookeeper",
]
