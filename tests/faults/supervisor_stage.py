"""A supervisor as a process of its own, and a socket on which its children report their starts and stops."""

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

PATIENCE_S = 60.0
_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
NO_DATABASE = "postgresql://nowhere/none"


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a state that sends no signal."""
    pause = threading.Event()
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        pause.wait(0.02)


def line_of(stream: IO[bytes]) -> str:
    """The next line of an unbuffered stream; empty at its end."""
    line = b""
    while not line.endswith(b"\n"):
        assert select.select([stream], [], [], PATIENCE_S)[0], f"no line came, only {line!r}"
        if not (byte := stream.read(1)):
            break
        line += byte
    return line.decode()


@dataclass
class Report:
    """One start of a child; the connection lives as long as it does."""

    name: str
    pid: int
    lines: IO[str]

    def says(self) -> str:
        """Its next line; empty once it is dead."""
        return self.lines.readline().strip()


@dataclass
class Stage:
    """Runs supervisors on one data folder, and hears their children."""

    data: Path
    path: str
    listener: socket.socket
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _open: ExitStack = field(default_factory=ExitStack)

    def child(self, name: str, attitude: str = "obey") -> tuple[str, list[str]]:
        return name, [sys.executable, str(_HERE / "reporting_child.py"), self.path, name, attitude]

    def supervisor(
        self,
        children: Sequence[tuple[str, Sequence[str]]],
        *,
        database_url: str | None = NO_DATABASE,
        drain_s: float = 15.0,
    ) -> subprocess.Popen[bytes]:
        plan = {
            "children": [[name, list(argv)] for name, argv in children],
            "database_url": database_url,
        }
        process = subprocess.Popen(
            [
                sys.executable,
                str(_HERE / "supervisor_program.py"),
                str(self.data),
                json.dumps({**plan, "drain_s": drain_s}),
            ],
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def report(self) -> Report:
        """The next child that has started."""
        connection, _ = self.listener.accept()
        self._open.callback(connection.close)
        connection.settimeout(PATIENCE_S)
        lines = self._open.enter_context(connection.makefile())
        name, pid = lines.readline().split()
        return Report(name, int(pid), lines)

    def reports(self, count: int) -> dict[str, Report]:
        return {report.name: report for report in (self.report() for _ in range(count))}

    def close(self) -> None:
        self._open.close()
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
            try:
                process.communicate(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


@contextmanager
def staged(data: Path) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = f"{folder}/reports"
        listener.bind(path)
        listener.listen()
        listener.settimeout(PATIENCE_S)
        stage = Stage(data, path, listener)
        try:
            yield stage
        finally:
            stage.close()
