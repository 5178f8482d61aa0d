"""Run Apache Artemis and Apache ZooKeeper as local servers, each on one port of loopback."""

import os
import shutil
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import ClassVar, Final

from rooms.local.maven import (
    FAST_START_OPTIONS,
    MavenArtifact,
    MavenPackage,
    cache_dir,
    fetch_package,
    find_java,
)
from rooms.local.nack_interceptor import compile_interceptor
from rooms.local.pidfile import write_private

_ANSWER_TIMEOUT_S: Final = 2.0
ARTEMIS_VERSION: Final = "2.56.0"
BROKER_XML: Final = Path(__file__).with_name("broker.xml")
USER: Final = "rooms"
# Others collect what a backlog leaves in pauses of up to 0.2 s, in which no message moves.
_SHORT_PAUSE_OPTIONS: Final = ("-XX:+UseZGC",)
ARTEMIS: Final = MavenPackage(
    folder=f"artemis-{ARTEMIS_VERSION}",
    artifacts=[
        MavenArtifact(
            group="org.apache.artemis",
            name="apache-artemis",
            version=ARTEMIS_VERSION,
            type="tar.gz",
            classifier="bin",
        )
    ],
    unpacked=True,
)
_SYNC_PROBES: Final = 40
_PROBE_BLOCK: Final = bytes(4096)
_SHORTEST_NS, _LONGEST_NS = 200_000, 5_000_000

_ARTEMIS_SETTINGS: Final[Mapping[str, str]] = {
    "etc/bootstrap.xml": """<broker xmlns="http://activemq.apache.org/schema">
  <security-manager
      class-name="org.apache.activemq.artemis.spi.core.security.ActiveMQBasicSecurityManager">
    <property key="bootstrapUser" value="{user}"/>
    <property key="bootstrapPassword" value="{password}"/>
    <property key="bootstrapRole" value="amq"/>
  </security-manager>
  <server configuration="{broker}"/>
</broker>
""",
    "etc/management.xml": '<management-context xmlns="http://activemq.apache.org/schema"/>\n',
    "etc/log4j2.properties": """rootLogger.level = INFO
rootLogger.appenderRef.console.ref = console
logger.audit.name = org.apache.activemq.audit
logger.audit.level = OFF
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d %-5level %logger{{1}}: %msg%n
""",
}
ZOOKEEPER_VERSION: Final = "3.9.5"
# ZooKeeper's pom leaves out the libraries for metrics, snapshots and logging.
_ZOOKEEPER: Final = MavenPackage(
    folder=f"zookeeper-{ZOOKEEPER_VERSION}",
    artifacts=[
        MavenArtifact(group="org.apache.zookeeper", name="zookeeper", version=ZOOKEEPER_VERSION),
        MavenArtifact(group="io.dropwizard.metrics", name="metrics-core", version="4.1.12.1"),
        MavenArtifact(group="org.xerial.snappy", name="snappy-java", version="1.1.10.5"),
        MavenArtifact(group="org.slf4j", name="slf4j-simple", version="2.0.13"),
    ],
)
_MODE_FIELD: Final = b"Mode:"
# A short tick allows short sessions, whose end is noticed soon.
_ZOOKEEPER_SETTINGS: Final = """clientPort={port}
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
class JavaServer(ABC):
    """Describe a server whose program Maven fetches, with its files in `<data>/<name>`.

    Every call blocks. Call `prepare` before each start, also after a kill; only `prepare` changes
    files.
    """

    data: Path
    port: int
    cache: Path = field(default_factory=cache_dir)
    heap_mib: int = 512
    _java: Path | None = field(default=None, init=False)

    name: ClassVar[str]
    package: ClassVar[MavenPackage]
    main_class: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    @property
    @abstractmethod
    def url(self) -> str:
        """Return the address that clients connect to."""

    @property
    def folder(self) -> Path:
        return self.data.absolute() / self.name

    @property
    def data_dir(self) -> Path:
        """Return the folder that must outlive the process."""
        return self.folder / "data"

    @property
    def environment(self) -> Mapping[str, str]:
        return {"LC_ALL": "C.UTF-8", "TZ": "UTC", "PATH": os.defpath}

    def fetch(self) -> None:
        """Fetch the program if it is missing. Raise MissingError or FetchError, with advice."""
        self._find_java()
        fetch_package(self.cache, self.package)

    def prepare(self) -> None:
        """Fetch the program, and write its settings. Raises the errors of `fetch`."""
        self.fetch()
        for folder in (self.data, self.folder, self.data_dir):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, text in self.settings_files().items():
            write_private(self.folder / path, text)

    @abstractmethod
    def settings_files(self) -> Mapping[str, str]:
        """Return the text of each settings file, by its path in the server's folder."""

    @abstractmethod
    def argv(self) -> list[str]:
        """Return the server's command line."""

    def is_ready(self) -> bool:
        """Return True if the server answers on its port."""
        try:
            with socket.create_connection(
                ("127.0.0.1", self.port), timeout=_ANSWER_TIMEOUT_S
            ) as connection:
                connection.settimeout(_ANSWER_TIMEOUT_S)
                return self._answers(connection)
        except OSError:
            return False

    @abstractmethod
    def _answers(self, connection: socket.socket) -> bool:
        """Return True if the server answers on this connection. May raise OSError."""

    def _command(
        self,
        *arguments: str,
        classpath: Path,
        options: Sequence[str],
        properties: Mapping[str, str],
    ) -> list[str]:
        return [
            str(self._find_java()),
            f"-Xmx{self.heap_mib}m",
            *options,
            *(f"-D{name}={value}" for name, value in properties.items()),
            "-classpath",
            str(classpath),
            self.main_class,
            *arguments,
        ]

    def _find_java(self) -> Path:
        if self._java is None:
            self._java = find_java()
        return self._java


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    """Return what the server sends up to `mark`, or less if it closes the connection."""
    received = b""
    while mark not in received and (part := connection.recv(4096)):
        received += part
    return received


@dataclass(slots=True, kw_only=True)
class EmbeddedArtemis(JavaServer):
    """Describe a broker that speaks STOMP on one port of loopback, tuned by `broker.xml`.

    `properties` are system properties that override defaults of `broker.xml`. `fast_start` trades
    speed under load for a fast start.
    """

    password: str
    fast_start: bool = False
    properties: Mapping[str, str] = field(default_factory=dict)

    name: ClassVar[str] = "artemis"
    package: ClassVar[MavenPackage] = ARTEMIS
    main_class: ClassVar[str] = "org.apache.activemq.artemis.boot.Artemis"

    @property
    def url(self) -> str:
        """Return `stomp://user:password@127.0.0.1:port`."""
        return f"stomp://{USER}:{self.password}@127.0.0.1:{self.port}"

    def fetch(self) -> None:
        # super() without arguments fails in classes that `slots=True` has recreated.
        """Fetch the broker, and compile its interceptor."""
        JavaServer.fetch(self)
        self._compile_interceptor()

    def prepare(self) -> None:
        """Prepare as every Java server, and measure the disk at the first start."""
        JavaServer.prepare(self)
        for name in ("tmp", "lib"):
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        shutil.copyfile(self._compile_interceptor(), self.folder / "lib/nack-interceptor.jar")
        if not self._sync_time_file.exists():
            write_private(self._sync_time_file, f"{sync_time_ns(self.data_dir)}\n")

    def settings_files(self) -> Mapping[str, str]:
        values = {"broker": BROKER_XML.as_uri(), "user": USER, "password": self.password}
        return {path: text.format(**values) for path, text in _ARTEMIS_SETTINGS.items()}

    def argv(self) -> list[str]:
        etc = self.folder / "etc"
        return self._command(
            "run",
            classpath=self._home / "lib/artemis-boot.jar",
            options=FAST_START_OPTIONS if self.fast_start else _SHORT_PAUSE_OPTIONS,
            properties={
                "java.io.tmpdir": str(self.folder / "tmp"),
                "log4j2.configurationFile": (etc / "log4j2.properties").as_uri(),
                "log4j2.disableJmx": "true",
                "artemis.home": str(self._home),
                "artemis.instance": str(self.folder),
                "artemis.instance.etc": str(etc),
                "data.dir": str(self.data_dir),
                "rooms.stomp.port": str(self.port),
                **self._journal_settings(),
                **self.properties,
            },
        )

    def _answers(self, connection: socket.socket) -> bool:
        # The broker opens its port last, once its journal and queues are loaded.
        headers = (
            "accept-version:1.2\nhost:rooms\nheart-beat:0,0\n"
            f"login:{USER}\npasscode:{self.password}"
        )
        connection.sendall(f"CONNECT\n{headers}\n\n\0".encode())
        if not read_until(connection, b"\0").lstrip().startswith(b"CONNECTED"):
            return False
        # The broker logs a warning for each connection that ends without DISCONNECT.
        connection.sendall(b"DISCONNECT\nreceipt:goodbye\n\n\0")
        return read_until(connection, b"\0").lstrip().startswith(b"RECEIPT")

    def _compile_interceptor(self) -> Path:
        return compile_interceptor(self.cache, self._find_java(), self._home / "lib")

    @property
    def _home(self) -> Path:
        return self.cache / ARTEMIS.folder / f"apache-artemis-{ARTEMIS_VERSION}"

    @property
    def _sync_time_file(self) -> Path:
        return self.folder / "etc" / "sync-time-ns"

    def _journal_settings(self) -> dict[str, str]:
        try:
            return {"rooms.journal.buffer.timeout.ns": self._sync_time_file.read_text().strip()}
        except FileNotFoundError:
            return {}


def sync_time_ns(folder: Path) -> int:
    """Return the median time of a small synced write to this disk, for the journal's batching."""
    probe = folder / "sync-probe"
    taken: list[int] = []
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for _ in range(_SYNC_PROBES):
            started_ns = time.perf_counter_ns()
            os.write(descriptor, _PROBE_BLOCK)
            os.fsync(descriptor)
            taken.append(time.perf_counter_ns() - started_ns)
    finally:
        os.close(descriptor)
        probe.unlink()
    return max(_SHORTEST_NS, min(_LONGEST_NS, int(median(taken))))


@dataclass(slots=True, kw_only=True)
class EmbeddedZookeeper(JavaServer):
    """Describe a single ZooKeeper on one port of loopback."""

    heap_mib: int = 128

    name: ClassVar[str] = "zookeeper"
    package: ClassVar[MavenPackage] = _ZOOKEEPER
    main_class: ClassVar[str] = "org.apache.zookeeper.server.quorum.QuorumPeerMain"

    @property
    def url(self) -> str:
        """Return `zookeeper://127.0.0.1:port`."""
        return f"zookeeper://127.0.0.1:{self.port}"

    def settings_files(self) -> Mapping[str, str]:
        return {"zoo.cfg": self.settings()}

    def settings(self) -> str:
        """Return the text of `zoo.cfg`."""
        return _ZOOKEEPER_SETTINGS.format(port=self.port, records=self.data_dir)

    def argv(self) -> list[str]:
        return self._command(
            str(self.folder / "zoo.cfg"),
            classpath=self.cache / _ZOOKEEPER.folder / "*",
            options=FAST_START_OPTIONS,
            properties={
                "org.slf4j.simpleLogger.defaultLogLevel": "warn",
                "org.slf4j.simpleLogger.showDateTime": "true",
                "zookeeper.jmx.log4j.disable": "true",
            },
        )

    def _answers(self, connection: socket.socket) -> bool:
        connection.sendall(b"srvr")
        return _MODE_FIELD in read_until(connection, _MODE_FIELD)
