"""Apache Artemis as one program to be kept alive: how it is fetched, prepared, started, asked and stopped."""

import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import ClassVar, Final

from rooms.embedded.cache import Artifact, Package, cache_folder, fetch
from rooms.embedded.files import write_private
from rooms.embedded.java import QUICK, find_java

VERSION: Final = "2.56.0"
BROKER_XML: Final = Path(__file__).with_name("broker.xml")
USER: Final = "rooms"
PACKAGE: Final = Package(
    folder=f"artemis-{VERSION}",
    artifacts=[
        Artifact(group="org.apache.artemis", name="apache-artemis", version=VERSION, type="tar.gz", classifier="bin")
    ],
    unpacked=True,
)
_ANSWER_TIMEOUT_S: Final = 2.0
_PROBES: Final = 40
_BLOCK: Final = bytes(4096)
_SHORTEST_NS, _LONGEST_NS = 200_000, 5_000_000

_FILES: Final[Mapping[str, str]] = {
    "bootstrap.xml": """<broker xmlns="http://activemq.apache.org/schema">
  <security-manager class-name="org.apache.activemq.artemis.spi.core.security.ActiveMQBasicSecurityManager">
    <property key="bootstrapUser" value="{user}"/>
    <property key="bootstrapPassword" value="{password}"/>
    <property key="bootstrapRole" value="amq"/>
  </security-manager>
  <server configuration="{broker}"/>
</broker>
""",
    "management.xml": '<management-context xmlns="http://activemq.apache.org/schema"/>\n',
    "log4j2.properties": """rootLogger.level = INFO
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
class EmbeddedArtemis:
    """A broker that speaks STOMP on one port of loopback, its instance in `<data>/artemis`, tuned by `broker.xml`.

    Every call blocks. `prepare` comes before each start, also after a kill; it fetches the program when it is missing, and is the
    only one that changes anything on disk. `properties` are system properties over the defaults that `broker.xml` names.
    `quick` trades speed under load for a quick start.
    """

    data: Path
    port: int
    password: str
    cache: Path = field(default_factory=cache_folder)
    heap_mib: int = 512
    quick: bool = False
    properties: Mapping[str, str] = field(default_factory=dict)
    _java: Path | None = field(default=None, init=False)

    name: ClassVar[str] = "artemis"
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    impatient_signals: ClassVar[tuple[signal.Signals, ...]] = (signal.SIGKILL,)

    @property
    def url(self) -> str:
        """`stomp://user:password@127.0.0.1:port`."""
        return f"stomp://{USER}:{self.password}@127.0.0.1:{self.port}"

    @property
    def folder(self) -> Path:
        return self.data.absolute() / "artemis"

    @property
    def records(self) -> Path:
        """What must outlive the process: bindings, journal, pages, large messages."""
        return self.folder / "data"

    @property
    def environment(self) -> Mapping[str, str]:
        return {"LC_ALL": "C.UTF-8", "TZ": "UTC", "PATH": os.defpath}

    def fetch(self) -> None:
        """Bring the program into the cache, where it is missing. Raises MissingError or FetchError, each with what to do about it."""
        self._found_java()
        fetch(self.cache, PACKAGE)

    def prepare(self) -> None:
        """Fetch the program when it is missing, and write the instance's settings. Raises what `fetch` does."""
        self.fetch()
        etc = self.folder / "etc"
        for folder in (self.data, self.folder, etc, self.folder / "tmp", self.records):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in _FILES.items():
            write_private(etc / name, text.format(broker=BROKER_XML.as_uri(), user=USER, password=self.password))
        if not self._pace_file.exists():
            write_private(self._pace_file, f"{sync_time_ns(self.records)}\n")

    def argv(self) -> list[str]:
        """The broker's command line."""
        home = self.cache / PACKAGE.folder / f"apache-artemis-{VERSION}"
        etc = self.folder / "etc"
        properties = {
            "java.io.tmpdir": str(self.folder / "tmp"),
            "log4j2.configurationFile": (etc / "log4j2.properties").as_uri(),
            "log4j2.disableJmx": "true",
            "artemis.home": str(home),
            "artemis.instance": str(self.folder),
            "artemis.instance.etc": str(etc),
            "data.dir": str(self.records),
            "rooms.stomp.port": str(self.port),
            **self._pace(),
            **self.properties,
        }
        return [
            str(self._found_java()),
            f"-Xmx{self.heap_mib}m",
            *(QUICK if self.quick else ("-XX:+UseG1GC",)),
            *(f"-D{name}={value}" for name, value in properties.items()),
            "-classpath",
            str(home / "lib/artemis-boot.jar"),
            "org.apache.activemq.artemis.boot.Artemis",
            "run",
        ]

    def _found_java(self) -> Path:
        if self._java is None:
            self._java = find_java()
        return self._java

    def answers(self) -> bool:
        """Whether it takes our user's connections. It opens its port last, once journal and queues are read."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=_ANSWER_TIMEOUT_S) as connection:
                connection.settimeout(_ANSWER_TIMEOUT_S)
                headers = f"accept-version:1.2\nhost:rooms\nheart-beat:0,0\nlogin:{USER}\npasscode:{self.password}"
                connection.sendall(f"CONNECT\n{headers}\n\n\0".encode())
                if not _frame(connection).startswith(b"CONNECTED"):
                    return False
                # Without a goodbye the broker complains of every question in its log.
                connection.sendall(b"DISCONNECT\nreceipt:goodbye\n\n\0")
                return _frame(connection).startswith(b"RECEIPT")
        except OSError:
            return False

    @property
    def _pace_file(self) -> Path:
        return self.folder / "etc" / "sync-time-ns"

    def _pace(self) -> dict[str, str]:
        try:
            return {"rooms.journal.buffer.timeout.ns": self._pace_file.read_text().strip()}
        except FileNotFoundError:
            return {}


def _frame(connection: socket.socket) -> bytes:
    """What the broker says next; less than a whole frame when it hangs up."""
    said = b""
    while b"\0" not in said and (part := connection.recv(4096)):
        said += part
    return said.lstrip()


def sync_time_ns(folder: Path) -> int:
    """How long one small write to this disk takes: the pace at which the journal gathers what it writes together."""
    probe = folder / "sync-probe"
    taken: list[int] = []
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for _ in range(_PROBES):
            began = time.perf_counter_ns()
            os.write(descriptor, _BLOCK)
            os.fsync(descriptor)
            taken.append(time.perf_counter_ns() - began)
    finally:
        os.close(descriptor)
        probe.unlink()
    return max(_SHORTEST_NS, min(_LONGEST_NS, int(median(taken))))
