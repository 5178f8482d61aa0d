"""Members of an election in this process and in others, a line that can be cut, and what must hold of what they did.

`python -m tests.support.election_members URL CLIENT LEASE_S MEMBER FILE PARTITION…` takes part and writes down whatever it may do.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

from sqlalchemy.engine import make_url

from delivery.leadership.postgres import HeartbeatConfig, PostgresElection
from delivery.leadership.zookeeper import ZooKeeperElection
from rooms.backend_urls import parse_zookeeper_url
from rooms.clock import SystemClock
from rooms.ports import Clock, Election, Membership

ROOT: Final = Path(__file__).parents[2]
PARTITIONS: Final = (
    "upkeep/leases",
    "upkeep/expiry",
    "upkeep/jobs",
    "upkeep/keys",
    "upkeep/partitions",
)
LEASE_S: Final = 2.0
"""Seconds that the store waits for a silent member."""
CALM_S: Final = 20.0
"""The same for tests without silent members: long enough for any busy machine."""
_CLOCK: Final = SystemClock()
_SOCKET: Final = ".s.PGSQL.5432"
_PAUSE_S: Final = 0.01

T = TypeVar("T")


def quick(
    url: str, client: str, member: str, clock: Clock = _CLOCK, *, lease_s: float = LEASE_S
) -> AbstractAsyncContextManager[Election]:
    """The election at `url`, in a hurry."""
    match urlsplit(url).scheme:
        case "postgresql":
            pulse = HeartbeatConfig(lease_s=lease_s, trust_s=0.7 * lease_s, ping_s=0.2, retry_s=0.1)
            return PostgresElection(url, member=member, clock=clock, heartbeat=pulse)
        case "zookeeper":
            address = replace(parse_zookeeper_url(url), session_s=lease_s, refresh_s=1)
            return ZooKeeperElection(address, client=client, member=member, clock=clock)
        case scheme:
            raise ValueError(f"there is no election by {scheme}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """Record one action.

    `asked` just before the member asked for permission, `reported` just after it received the answer.
    """

    member: str
    partition: str
    epoch: int
    asked: float
    reported: float


def check(acts: Iterable[Act]) -> None:
    """Check that each member acts only in its own epoch, epochs only grow, and none acts after a higher epoch has acted."""
    by_epoch: dict[tuple[str, int], list[Act]] = defaultdict(list)
    for act in acts:
        by_epoch[act.partition, act.epoch].append(act)
    latest: dict[str, tuple[int, float]] = {}
    for (partition, epoch), together in sorted(by_epoch.items()):
        assert len({act.member for act in together}) == 1, f"{partition}: two act in epoch {epoch}"
        older, asked = latest.get(partition, (0, 0.0))
        reported = min(act.reported for act in together)
        assert asked <= reported, (
            f"{partition}: epoch {older} still acts {asked - reported:.3f} s after epoch {epoch} began"
        )
        latest[partition] = epoch, max(asked, *(act.asked for act in together))


@dataclass(slots=True)
class Player:
    """A member in a process of its own."""

    name: str
    process: subprocess.Popen[bytes]
    file: Path
    _read: int = 0
    _acts: list[Act] = field(default_factory=list)

    def acts(self) -> list[Act]:
        """Return the member's actions; a line that is being written is not one yet."""
        if self.file.exists():
            with self.file.open("rb") as file:
                file.seek(self._read)
                whole, end, _ = file.read().rpartition(b"\n")
            self._read += len(whole) + len(end)
            self._acts += [Act(member=self.name, **json.loads(line)) for line in whole.splitlines()]
        return self._acts

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Without waiting for it: to the machine it is dead, to its parent not yet."""
        self.process.kill()


class Stage:
    """The players of a test on one store, seen from outside."""

    def __init__(
        self, url: str, client: str, folder: Path, election: Election, *, lease_s: float = LEASE_S
    ) -> None:
        self.url = url
        self.lease_s = lease_s
        self.client = client
        self.folder = folder
        self.election = election
        self.players: dict[str, Player] = {}

    def start(self, name: str, url: str | None = None) -> Player:
        """A new member, by another way to the store where one is given."""
        file = self.folder / f"{name}.acts"
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [
                    *(
                        sys.executable,
                        "-m",
                        "tests.support.election_members",
                        url or self.url,
                        self.client,
                        str(self.lease_s),
                    ),
                    *(name, str(file), *PARTITIONS),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )
        self.players[name] = Player(name, process, file)
        return self.players[name]

    def acts(self) -> list[Act]:
        return [act for player in self.players.values() for act in player.acts()]

    async def all_act(self, *names: str) -> float:
        """Wait until only these members act on every partition, each with its share; return the seconds it took."""
        began = time.monotonic()

        async def shared() -> bool:
            latest: dict[str, Act] = {}
            for act in sorted(self.acts(), key=lambda act: act.reported):
                if act.reported > began:
                    latest[act.partition] = act
            counts = Counter(act.member for act in latest.values())
            return (
                latest.keys() == set(PARTITIONS)
                and counts.keys() == set(names)
                and max(counts.values()) - min(counts.values()) <= 1
            )

        await until(shared, f"{', '.join(names)} to act")
        return time.monotonic() - began

    async def leader(self, *, other_than: str | None = None) -> str:
        """The leader's name, as soon as there is one."""

        async def known() -> str | None:
            with contextlib.suppress(Exception):
                found = (await self.election.view()).leader
                return found if found != other_than else None
            return None

        return await until(known, "a leader") or ""

    def end(self) -> None:
        """End all members."""
        for player in self.players.values():
            if player.process.poll() is None:
                player.wake()
                player.process.kill()
            player.process.wait()


async def until(look: Callable[[], Awaitable[T]], what: str, *, within_s: float = 90.0) -> T:
    """Return the result of `look` as soon as it is true."""
    deadline = time.monotonic() + within_s
    while not (found := await look()):
        assert time.monotonic() < deadline, (
            f"waited {within_s:g} s in vain for {what}; last seen: {found!r}"
        )
        await asyncio.sleep(0.01)
    return found


class Line:
    """A way to the store that can be cut: connections stay open, and nothing goes through any more."""

    def __init__(self) -> None:
        self.url = ""
        self._through = asyncio.Event()
        self._through.set()
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        self._through.clear()

    def mend(self) -> None:
        self._through.set()

    def tear(self) -> None:
        """End every connection at once, on both sides; new ones go through."""
        for writer in self._writers:
            writer.transport.abort()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward data and its end; both are held back while the line is cut."""
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError):
                while part := await reader.read(1 << 16):
                    await self._through.wait()
                    writer.write(part)
                    await writer.drain()
            await self._through.wait()
        finally:
            self._writers.discard(writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@asynccontextmanager
async def line_to(url: str) -> AsyncIterator[Line]:
    """A line to the store at `url`, by TCP or, where that is the way, by a socket file."""
    line = Line()
    tasks: set[asyncio.Task[None]] = set()
    parts = urlsplit(url)
    file = dict(make_url(url).query).get("host") if parts.scheme == "postgresql" else None

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if isinstance(file, str):
            there = await asyncio.open_unix_connection(f"{file}/{_SOCKET}")
        else:
            there = await asyncio.open_connection(parts.hostname, parts.port)
        for way in (line.carry(reader, there[1]), line.carry(there[0], writer)):
            task = asyncio.create_task(way)
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    with tempfile.TemporaryDirectory(prefix="line-") as folder:
        if isinstance(file, str):
            server = await asyncio.start_unix_server(serve, f"{folder}/{_SOCKET}")
            os.chmod(folder, 0o755)  # noqa: PTH101
            line.url = (
                make_url(url)
                .update_query_dict({"host": folder})
                .render_as_string(hide_password=False)
            )
        else:
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            login, at, _ = parts.netloc.rpartition("@")
            line.url = parts._replace(netloc=f"{login}{at}{address}").geturl()
        try:
            yield line
        finally:
            line.mend()
            server.close()
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _act(membership: Membership, partitions: Sequence[str], file: Path) -> None:
    with file.open("a", buffering=1) as reported:
        while True:
            for partition in partitions:
                asked = time.monotonic()
                epoch = membership.epoch(partition)
                if epoch is not None:
                    act = {
                        "partition": partition,
                        "epoch": epoch,
                        "asked": asked,
                        "reported": time.monotonic(),
                    }
                    reported.write(f"{json.dumps(act)}\n")
            await asyncio.sleep(_PAUSE_S)


async def _play(
    url: str, client: str, member: str, file: Path, partitions: Sequence[str], *, lease_s: float
) -> None:
    async with (
        quick(url, client, member, lease_s=lease_s) as election,
        election.join(partitions) as membership,
    ):
        acting = asyncio.create_task(_act(membership, partitions, file))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, acting.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await acting


if __name__ == "__main__":
    asyncio.run(
        _play(
            sys.argv[1],
            sys.argv[2],
            sys.argv[4],
            Path(sys.argv[5]),
            sys.argv[6:],
            lease_s=float(sys.argv[3]),
        )
    )
