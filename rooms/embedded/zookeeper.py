"""Apache ZooKeeper as one program to be kept alive: how it is fetched, prepared, started, asked and stopped."""

import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from rooms.embedded.cache import Artifact, Package, cache_folder, fetch
from rooms.embedded.java import QUICK, find_java

VERSION: Final = "3.9.5"
# Its own pom leaves out what it needs for metrics, for snapshots and to say anything at all.
_PACKAGE: Final = Package(
    folder=f"zookeeper-{VERSION}",
    artifacts=[
        Artifact(group="org.apache.zookeeper", name="zookeeper", version=VERSION),
        Artifact(group="io.dropwizard.metrics", name="metrics-core", version="4.1.12.1"),
        Artifact(group="org.xerial.snappy", name="snappy-java", version="1.1.10.5"),
        Artifact(group="org.slf4j", name="slf4j-simple", version="2.0.13"),
    ],
)
_ANSWER_TIMEOUT_S: Final = 2.0
_MODE: Final = b"Mode:"
# A short tick, so that sessions may be short and their end is noticed soon.
_SETTINGS: Final = """clientPort={port}
clientPortAddress=127.0.0.1
dataDir={records}
tickTime=500
minSessionTimeout=1000
maxSessionTimeout=60000
maxClientCnxns=0
admin.enableServer=false
4lw.commands.whitelist=srvr
autopurge.snapRetainCount=3
autopurge.purgeInterval=1
preAllocSize=1024
"""


@dataclass(slots=True, kw_only=True)
class EmbeddedZookeeper:
    """One ZooKeeper, standing alone on one port of loopback, its records in `<data>/zookeeper/data`.

    Every call blocks. `prepare` comes before each start, also after a kill; it fetches the program when it is missing, and is the
    only one that changes anything on disk.
    """

    data: Path
    port: int
    cache: Path = field(default_factory=cache_folder)
    heap_mib: int = 128
    _java: Path | None = field(default=None, init=False)

    name: ClassVar[str] = "zookeeper"
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    impatient_signals: ClassVar[tuple[signal.Signals, ...]] = (signal.SIGKILL,)

    @property
    def url(self) -> str:
        """`zookeeper://127.0.0.1:port`."""
        return f"zookeeper://127.0.0.1:{self.port}"

    @property
    def folder(self) -> Path:
        return self.data.absolute() / "zookeeper"

    @property
    def records(self) -> Path:
        """What must outlive the process: its log and snapshots."""
        return self.folder / "data"

    @property
    def environment(self) -> Mapping[str, str]:
        return {"LC_ALL": "C.UTF-8", "TZ": "UTC", "PATH": os.defpath}

    def fetch(self) -> None:
        """Bring the program into the cache, where it is missing. Raises MissingError or FetchError, each with what to do about it."""
        self._found_java()
        fetch(self.cache, _PACKAGE)

    def prepare(self) -> None:
        """Fetch the program when it is missing, and write its settings. Raises what `fetch` does."""
        self.fetch()
        for folder in (self.data, self.folder, self.records):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.folder / "zoo.cfg").write_text(self.settings())

    def settings(self) -> str:
        """What `zoo.cfg` says."""
        return _SETTINGS.format(port=self.port, records=self.records)

    def argv(self) -> list[str]:
        """The server's command line."""
        return [
            str(self._found_java()),
            f"-Xmx{self.heap_mib}m",
            *QUICK,
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
            "-Dorg.slf4j.simpleLogger.showDateTime=true",
            "-Dzookeeper.jmx.log4j.disable=true",
            "-classpath",
            str(self.cache / _PACKAGE.folder / "*"),
            "org.apache.zookeeper.server.quorum.QuorumPeerMain",
            str(self.folder / "zoo.cfg"),
        ]

    def _found_java(self) -> Path:
        if self._java is None:
            self._java = find_java()
        return self._java

    def answers(self) -> bool:
        """Whether it serves."""
        said = b""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=_ANSWER_TIMEOUT_S) as connection:
                connection.settimeout(_ANSWER_TIMEOUT_S)
                connection.sendall(b"srvr")
                while _MODE not in said and (part := connection.recv(4096)):
                    said += part
        except OSError:
            return False
        return _MODE in said
