"""Run Apache Artemis as a local server, from its settings to its readiness check."""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import ClassVar, Final

from rooms.local.java_server import JavaServer, read_until
from rooms.local.maven import FAST_START_OPTIONS, MavenArtifact, MavenPackage
from rooms.local.pidfile import write_private

VERSION: Final = "2.56.0"
BROKER_XML: Final = Path(__file__).with_name("broker.xml")
USER: Final = "rooms"
PACKAGE: Final = MavenPackage(
    folder=f"artemis-{VERSION}",
    artifacts=[
        MavenArtifact(
            group="org.apache.artemis",
            name="apache-artemis",
            version=VERSION,
            type="tar.gz",
            classifier="bin",
        )
    ],
    unpacked=True,
)
_SYNC_PROBES: Final = 40
_PROBE_BLOCK: Final = bytes(4096)
_SHORTEST_NS, _LONGEST_NS = 200_000, 5_000_000

_SETTINGS_FILES: Final[Mapping[str, str]] = {
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
    package: ClassVar[MavenPackage] = PACKAGE
    main_class: ClassVar[str] = "org.apache.activemq.artemis.boot.Artemis"

    @property
    def url(self) -> str:
        """Return `stomp://user:password@127.0.0.1:port`."""
        return f"stomp://{USER}:{self.password}@127.0.0.1:{self.port}"

    def prepare(self) -> None:
        # super() without arguments fails in classes that `slots=True` has recreated.
        """Prepare as every Java server, and measure the disk at the first start."""
        JavaServer.prepare(self)
        (self.folder / "tmp").mkdir(mode=0o700, exist_ok=True)
        if not self._sync_time_file.exists():
            write_private(self._sync_time_file, f"{sync_time_ns(self.data_dir)}\n")

    def settings_files(self) -> Mapping[str, str]:
        values = {"broker": BROKER_XML.as_uri(), "user": USER, "password": self.password}
        return {path: text.format(**values) for path, text in _SETTINGS_FILES.items()}

    def argv(self) -> list[str]:
        home = self.cache / PACKAGE.folder / f"apache-artemis-{VERSION}"
        etc = self.folder / "etc"
        return self._command(
            "run",
            classpath=home / "lib/artemis-boot.jar",
            options=FAST_START_OPTIONS if self.fast_start else ("-XX:+UseG1GC",),
            properties={
                "java.io.tmpdir": str(self.folder / "tmp"),
                "log4j2.configurationFile": (etc / "log4j2.properties").as_uri(),
                "log4j2.disableJmx": "true",
                "artemis.home": str(home),
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
