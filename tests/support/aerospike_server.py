"""Run a real Aerospike for tests.

`asd` has a small configuration of its own, in memory, on free ports of loopback.

No package registry ships the server. One that was built or installed by hand is found on the PATH;
AEROSPIKE_URL names one that runs already.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aerospike
from aerospike import exception
from aerospike_helpers.operations import operations

from delivery.magazines import aerospike_records
from rooms.local.services import free_port
from tests.support.polling import until

NAMESPACE: Final = "rooms"
REASON: Final = "there is no Aerospike: no asd on the PATH, and AEROSPIKE_URL names none"
_READY: Final = "service ready: soon there will be cake!"
_STOP_S: Final = 20
_CONFIGURATION: Final = """
service {{
    cluster-name rooms-tests
    work-directory {folder}
    pidfile {folder}/asd.pid
    run-as-daemon false
    proto-fd-max 1024
    service-threads 4
}}
logging {{
    console {{
        context any info
    }}
}}
network {{
    service {{
        address 127.0.0.1
        port {service}
    }}
    heartbeat {{
        mode mesh
        address 127.0.0.1
        port {heartbeat}
        interval 150
        timeout 10
    }}
    fabric {{
        address 127.0.0.1
        port {fabric}
    }}
    admin {{
        address 127.0.0.1
        port {admin}
    }}
}}
mod-lua {{
    user-path {folder}/lua
}}
namespace {namespace} {{
    replication-factor 1
    nsup-period 1
    storage-engine {engine}
}}
"""
_IN_MEMORY: Final = """memory {{
        data-size 1G
    }}"""
_ON_DISK: Final = """device {{
        file {folder}/rooms.dat
        filesize 1G
    }}"""


def _free_ports(many: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < many:
        ports.add(free_port())
    return list(ports)


class AerospikeServer:
    """One node on a folder, in memory: started again after a kill, it is empty.

    `on_disk`: it has what it had flushed.
    """

    def __init__(self, binary: str, folder: Path, *, on_disk: bool = False) -> None:
        self._binary = binary
        self._folder = folder
        for part in ("smd", "lua", "usr/udf/lua"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        service, heartbeat, fabric, admin = _free_ports(4)
        self._port = service
        (folder / "aerospike.conf").write_text(
            _CONFIGURATION.format(
                folder=folder,
                namespace=NAMESPACE,
                service=service,
                heartbeat=heartbeat,
                fabric=fabric,
                admin=admin,
                engine=(_ON_DISK if on_disk else _IN_MEMORY).format(folder=folder),
            )
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"aerospike://127.0.0.1:{self._port}/{NAMESPACE}"

    def start(self) -> None:
        log = self._folder / "asd.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [
                    self._binary,
                    "--foreground",
                    "--config-file",
                    str(self._folder / "aerospike.conf"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=self._folder,
            )
        self._process = process

        def ready() -> bool:
            reported = log.read_text(errors="replace")
            assert process.poll() is None, f"asd did not start:\n{reported[-4000:]}"
            return _READY in reported

        until(ready, "asd to be ready")
        until(self._writes, "asd to take a write")

    def _writes(self) -> bool:
        # Ready is said before the node has all its partitions.
        try:
            with closing(aerospike.client({"hosts": [("127.0.0.1", self._port)]})) as client:
                client.put((NAMESPACE, "ready", "ready"), {"ready": 1})
        except exception.AerospikeError:
            return False
        return True

    def freeze(self) -> None:
        """It neither answers nor goes away, from the return of this on: a busy machine stops one thread after the other."""
        self._signal(signal.SIGSTOP)
        until(self._stands, "every thread of asd to stand still")

    def _stands(self) -> bool:
        assert self._process is not None
        try:
            states = {
                task.read_text().rpartition(")")[2].split()[0]
                for task in Path(f"/proc/{self._process.pid}/task").glob("*/stat")
            }
        except OSError:  # a thread has ended meanwhile
            return False
        return states == {"T"}

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """At once, and with all that it held."""
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(_STOP_S)
        self._process = None

    def restart(self) -> None:
        """End it as an operator does, so that it flushes everything, and start it again."""
        self._signal(signal.SIGTERM)
        assert self._process is not None
        self._process.wait(_STOP_S)
        self.start()

    def kill_until_dropped(self) -> None:
        """Kill it, and wait until a client has dropped the node, some 5 s later: it then answers without asking any."""
        with closing(aerospike.client({"hosts": [("127.0.0.1", self._port)]})) as client:
            self.kill()
            until(lambda: not client.get_node_names(), "a client to drop the dead node")

    def stop(self) -> None:
        if self._process is not None:
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


def asd() -> str | None:
    """Where the server's program is."""
    return shutil.which("asd")


def aged(url: str, client: str, *, by_s: int) -> None:
    """Every slot of that client's magazines as if it had been written, and handed out, so much earlier."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    with closing(aerospike.client({"hosts": [(parts.hostname, parts.port)]})) as connection:
        for key, _, bins in connection.query(parts.path.strip("/"), f"{client}_data_set").results():
            earlier = [
                operations.increment(name, -1000 * by_s)
                for name in (aerospike_records.LOAD_TS, aerospike_records.FIRE_TS)
                if bins.get(name)
            ]
            if earlier:
                connection.operate(key, earlier, policy={"ttl": aerospike.TTL_DONT_UPDATE})


@contextmanager
def aerospike_server(folder: Path) -> Iterator[AerospikeServer | None]:
    """A started node, stopped in the end; None where there is no program."""
    binary = asd()
    if binary is None:
        yield None
        return
    server = AerospikeServer(binary, folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextmanager
def aerospike_address(folder: Path) -> Iterator[str | None]:
    """The address of the one that the environment names, or of one that lives as long as this."""
    if given := os.environ.get("AEROSPIKE_URL"):
        yield given
        return
    with aerospike_server(folder) as server:
        yield None if server is None else server.url
