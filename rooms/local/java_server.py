"""Share what Artemis and ZooKeeper have in common: a Java program on one port of loopback."""

import os
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from rooms.local.maven import MavenPackage, cache_dir, fetch_package, find_java
from rooms.local.pidfile import write_private

_ANSWER_TIMEOUT_S: Final = 2.0


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
