"""Where ordered webhooks go: a server that writes whose turn it was, and fails by chance or for one key.

    python -m tests.bench.turns --port N --log FILE [--fails 0.1] [--stuck KEY] [--dead-s 600]

A payload begins with `{"sent":<epoch ns>,"turn":"<key>/<number>"`; the log has a line for each request: epoch seconds, key,
number, the nanoseconds, and the status that it was answered with.
"""

import argparse
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

import uvloop

from tests.bench.receiver import Connection, Tail, receive, receiving
from tests.bench.service import free_port

_TURN: Final = re.compile(rb'"sent":(\d+),"turn":"([^"/]+)/(\d+)"')
_OK: Final = 204
_FAILED: Final = 503
_ANSWERS: Final = {
    _OK: b"HTTP/1.1 204 No Content\r\n\r\n",
    _FAILED: b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
}


class _Connection(Connection):
    def __init__(self, log: IO[str], fails: Callable[[str], bool]) -> None:
        self._log = log
        self._fails = fails

    def on_message_complete(self) -> None:
        if (found := _TURN.search(self.body)) is None:
            return
        sent, key, number = (part.decode() for part in found.groups())
        status = _FAILED if self._fails(key) else _OK
        self._log.write(f"{self.at:.6f} {key} {number} {sent} {status}\n")
        self.transport.write(_ANSWERS[status])


@dataclass(slots=True)
class Turns:
    """Hold the arrivals, as far as the log was read."""

    port: int
    log: Tail
    numbers: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By key, in the order in which they came."""
    done: set[tuple[str, int]] = field(default_factory=set)
    """Return the arrivals answered with success."""
    latencies_ms: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """From `sent` to the first success."""
    last_at: float = 0.0
    requests: int = 0
    calls: list[tuple[float, bool]] = field(default_factory=list)
    """When each call came, and whether it was answered with success."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/turns"

    def read(self) -> None:
        for line in self.log.lines():
            at, key, number, sent, status = line.split(" ")
            self.requests += 1
            self.calls.append((float(at), int(status) == _OK))
            self.numbers[key].append(int(number))
            if int(status) == _OK and (key, int(number)) not in self.done:
                self.done.add((key, int(number)))
                self.last_at = float(at)
                self.latencies_ms[key].append((self.last_at - int(sent) / 1e9) * 1000)

    def disorder(self) -> list[str]:
        """Keys in which a number came after a later one had come."""
        return [key for key, numbers in self.numbers.items() if numbers != sorted(numbers)]


@contextmanager
def turning(
    folder: Path, *, fails: float = 0.0, stuck: str = "", dead_s: float = 0.0
) -> Iterator[Turns]:
    """A sink that fails such a share of the calls, every call of the key `stuck`, and every call of its first seconds."""
    port = free_port()
    log = folder / f"turns-{port}.log"
    log.touch()
    command = [sys.executable, "-m", "tests.bench.turns", "--port", str(port), "--log", str(log)]
    command += ["--fails", str(fails), "--stuck", stuck, "--dead-s", str(dead_s)]
    try:
        with receiving(command, port):
            yield Turns(port, Tail(log))
    finally:
        log.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--fails", type=float, default=0.0)
    parser.add_argument("--stuck", default="")
    parser.add_argument("--dead-s", type=float, default=0.0)
    given = parser.parse_args()
    draw, alive_at = random.Random(17).random, time.time() + given.dead_s
    stuck, share = str(given.stuck), float(given.fails)

    def fails(key: str) -> bool:
        return time.time() < alive_at or key == stuck or draw() < share

    with given.log.open("a", buffering=1 << 16) as log:
        uvloop.run(receive(lambda: _Connection(log, fails), given.port, log=log))


if __name__ == "__main__":
    main()
