"""Keeps PostgreSQL and the processes of Rooms alive, and takes them all down together."""

import asyncio
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rooms.embedded.claim import MARK, claimed, mark
from rooms.embedded.keeper import Child, Keeper
from rooms.embedded.logbook import Logbook
from rooms.embedded.readiness import unanswered, until_ready
from rooms.embedded.server import EmbeddedPostgres
from rooms.embedded.session import Session
from rooms.terminal import lines_safe

# Errors of single statements are told by whoever sent them.
_POSTGRES_WARNINGS = re.compile(r"PANIC|No space left|could not (write|extend|fsync)")
_EVERYTHING = re.compile("")
# Recovery after a crash reads up to max_wal_size again.
_POSTGRES_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What is running, once all of it is ready."""

    database_url: str
    logs: Path
    took_s: float


def print_line(line: str) -> None:
    # The terminal may be gone; what runs goes on.
    with suppress(OSError):
        sys.stderr.write(f"rooms: {lines_safe(line)}\n")
        sys.stderr.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervisor:
    """Runs PostgreSQL (only without `database_url`) and the foundations, then `migrate`, then the children; stops the children
    in their order, then what they stand on.

    Children get `environment`, DATABASE_URL and their own `env`. Their output goes to `<data>/log/<name>.log`; warnings in it,
    and what the supervisor itself has to tell, also to `say`. `on_ready` is called once, when every child that has a `ready` answered.
    SIGINT, SIGTERM and SIGHUP stop everything: `drain_s` for all children together, then the rest; a second one hurries.
    """

    data: Path
    children: Sequence[Child]
    environment: Mapping[str, str]
    foundations: Sequence[Child] = ()
    database_url: str | None = None
    migrate: Callable[[str], None] | None = None
    on_ready: Callable[[Started], None] | None = None
    drain_s: float = 15.0
    say: Callable[[str], None] = print_line

    async def run(self) -> None:
        """Run until stopped. To be called from the main thread.

        Raises DataInUseError, IdentityError, InitialisationError, StartError, or what `migrate` raises; everything
        that was started is down by then.
        """
        data = self.data.absolute()
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        logs = data / "log"
        logs.mkdir(mode=0o700, exist_ok=True)
        with ExitStack() as stack:
            run = stack.enter_context(claimed(data))
            own = stack.enter_context(_logbook(logs, "supervisor", echo=self.say, warnings=_EVERYTHING))

            def keep(child: Child, environment: Mapping[str, str]) -> Keeper:
                book = stack.enter_context(
                    _logbook(
                        logs, child.name, echo=lambda line: own.write(f"{child.name}: {line}"), warnings=child.warnings
                    )
                )
                return Keeper(child, environment=environment, run=run, book=book, say=own.write)

            foundations = []
            if (url := self.database_url) is None:
                server = EmbeddedPostgres(data)
                url = server.url
                foundations.append(keep(_postgres(server), server.environment))
            environment = {**self.environment, "DATABASE_URL": url, MARK: mark(data)}
            foundations += [keep(child, environment) for child in self.foundations]
            keepers = [keep(child, environment) for child in self.children]
            session = Session(foundations=foundations, keepers=keepers, drain_s=self.drain_s)
            with session.stopped_by_signals(own.write):
                await session.run(lambda: self._start(session, url, logs))

    async def _start(self, session: Session, url: str, logs: Path) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        for foundation in session.foundations:
            session.start(foundation)
            await until_ready(foundation)
        if self.migrate is not None:
            await asyncio.to_thread(self.migrate, url)
        for keeper in session.keepers:
            await unanswered(keeper)
            session.start(keeper)
        for keeper in session.keepers:
            await until_ready(keeper)
        if self.on_ready is not None:
            self.on_ready(Started(database_url=url, logs=logs, took_s=clock() - began))


def _postgres(server: EmbeddedPostgres) -> Child:
    async def answers() -> bool:
        return await asyncio.to_thread(server.answers)

    return Child(
        name="postgres",
        argv=server.argv(),
        cwd=Path("/"),
        stop_signal=server.stop_signal,
        impatient=server.impatient_signals,
        death=server.stop_signal,
        prepare=server.prepare,
        identity=lambda: server.worn,
        ready=answers,
        ready_timeout_s=_POSTGRES_TIMEOUT_S,
        warnings=_POSTGRES_WARNINGS,
    )


@contextmanager
def _logbook(logs: Path, name: str, *, echo: Callable[[str], None], warnings: re.Pattern[str]) -> Iterator[Logbook]:
    book = Logbook(logs / f"{name}.log", echo=echo, warnings=warnings)
    try:
        yield book
    finally:
        book.close()
