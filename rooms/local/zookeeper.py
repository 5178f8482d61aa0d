"""Run Apache ZooKeeper as a local server, from its settings to its readiness check."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from rooms.local.java_server import JavaServer, read_until
from rooms.local.maven import FAST_START_OPTIONS, MavenArtifact, MavenPackage

VERSION: Final = "3.9.5"
# ZooKeeper's pom leaves out the libraries for metrics, snapshots and logging.
_PACKAGE: Final = MavenPackage(
    folder=f"zookeeper-{VERSION}",
    artifacts=[
        MavenArtifact(group="org.apache.zookeeper", name="zookeeper", version=VERSION),
        MavenArtifact(group="io.dropwizard.metrics", name="metrics-core", version="4.1.12.1"),
        MavenArtifact(group="org.xerial.snappy", name="snappy-java", version="1.1.10.5"),
        MavenArtifact(group="org.slf4j", name="slf4j-simple", version="2.0.13"),
    ],
)
_MODE_FIELD: Final = b"Mode:"
# A short tick allows short sessions, whose end is noticed soon.
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
class EmbeddedZookeeper(JavaServer):
    """Describe a single ZooKeeper on one port of loopback."""

    heap_mib: int = 128

    name: ClassVar[str] = "zookeeper"
    package: ClassVar[MavenPackage] = _PACKAGE
    main_class: ClassVar[str] = "org.apache.zookeeper.server.quorum.QuorumPeerMain"

    @property
    def url(self) -> str:
        """Return `zookeeper://127.0.0.1:port`."""
        return f"zookeeper://127.0.0.1:{self.port}"

    def settings_files(self) -> Mapping[str, str]:
        return {"zoo.cfg": self.settings()}

    def settings(self) -> str:
        """Return the text of `zoo.cfg`."""
        return _SETTINGS.format(port=self.port, records=self.data_dir)

    def argv(self) -> list[str]:
        return self._command(
            str(self.folder / "zoo.cfg"),
            classpath=self.cache / _PACKAGE.folder / "*",
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
