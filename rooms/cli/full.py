"""`rooms full`: PostgreSQL, Artemis and ZooKeeper on this machine without Docker, and Rooms on them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from rooms.cli.errors import CliError
from rooms.cli.session import Group, Session, pass_session

if TYPE_CHECKING:
    from rooms.embedded import Child
    from rooms.embedded.services import Services

_PATIENCE_S: Final = 300.0
_STOP_PATIENCE_S: Final = 60.0
_POLL_S: Final = 0.1
_KEEPER: Final = ("full", "keep")


@click.group(cls=Group)
def full() -> None:
    """PostgreSQL, Artemis and ZooKeeper on this machine, and Rooms on them. Needs Java 17 or later, and Maven."""


@full.command("up")
@pass_session
def up(session: Session) -> None:
    """Start the servers and leave them running; ROOMS_DATA/full.env then has their addresses."""
    with _explained():
        services = _services(session)
        if started := _laid_out(services):
            _start_keeper(services)
        else:
            _wait(services.answer, "the servers, which somebody else started,")
        _tell(session, services, "started" if started else "running already")


@full.command("down")
@pass_session
def down(session: Session) -> None:
    """Stop the servers that `up` left running. Their data stays."""
    from rooms.embedded import processes
    from rooms.embedded.claim import MARK, claimed, holder, mark

    with _explained():
        services = _services(session)
        keeper = holder(services.folder)
        if keeper is None:
            if services.folder.is_dir():
                # What a killed keeper left goes with the claim.
                with claimed(services.folder):
                    pass
            _say(session, services, "not running")
            return
        if keeper in processes.marked(MARK, mark(services.data)):
            raise CliError("the servers belong to `make run-full`: stop that one, by Ctrl-C")
        if not processes.end(keeper, (signal.SIGTERM, _STOP_PATIENCE_S)):
            raise CliError(
                f"process {keeper}, which keeps the servers, does not end; its logs are in {services.folder}/log"
            )
        _say(session, services, "stopped")


@full.command("run")
@pass_session
def run(session: Session) -> None:
    """Run everything on the servers, starting them if need be, until Ctrl-C."""
    from rooms.cli.dev import supervise
    from rooms.embedded.claim import claimed
    from rooms.errors import SettingsError
    from rooms.settings import read_settings

    with _explained():
        services = _services(session)
        # Another that runs here is told at once; what a killed one left is ended before the servers are looked at.
        services.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        with claimed(services.data):
            started = _laid_out(services)
        if not started:
            _wait(services.answer, "the servers, which somebody else started,")
        environment = {**os.environ, **services.addresses()}
        try:
            settings = read_settings(environment)
        except SettingsError as exc:
            raise click.UsageError("\n".join(exc.problems)) from exc
        supervise(session, settings, environment, foundations=[_keeper(services)] if started else [])


@full.command("keep", hidden=True)
@pass_session
def keep(session: Session) -> None:
    """Keep the servers alive until SIGTERM: what `up` starts in the background, and `run` as one of its own."""
    import asyncio

    from rooms.embedded import Supervisor

    with _explained():
        services = _services(session)
        asyncio.run(Supervisor(data=services.folder, children=services.children(), environment=dict(os.environ)).run())


def _services(session: Session) -> "Services":
    from rooms.embedded.services import Services

    return Services(data=session.settings().data)


def _laid_out(services: "Services") -> bool:
    """Make everything ready for a start; False when a keeper is at work already."""
    from rooms.embedded import DataInUseError

    services.fetch()
    try:
        services.lay_out()
    except DataInUseError:
        return False
    return True


def _start_keeper(services: "Services") -> None:
    from rooms.embedded.claim import holder

    logs = services.folder / "log"
    logs.mkdir(mode=0o700, exist_ok=True)
    said = logs / "keeper.log"
    with said.open("wb") as file:
        process = subprocess.Popen(
            _command(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "ROOMS_DATA": str(services.data.absolute())},
            start_new_session=True,
        )

    def ready() -> bool:
        if process.poll() is not None and holder(services.folder) is None:
            raise CliError(f"the servers did not start:\n{said.read_text(errors='replace').strip()}")
        return services.answer()

    _wait(ready, "the servers")


def _keeper(services: "Services") -> "Child":
    import asyncio

    from rooms.embedded import Child

    async def answer() -> bool:
        return await asyncio.to_thread(services.answer)

    return Child(name="servers", argv=_command(), ready=answer, ready_timeout_s=_PATIENCE_S)


def _command() -> list[str]:
    return [sys.executable, "-m", "rooms", *_KEEPER]


def _wait(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not ready():
        if time.monotonic() > deadline:
            raise CliError(f"{what} did not answer within {_PATIENCE_S:g} s")
        time.sleep(_POLL_S)


def _tell(session: Session, services: "Services", state: str) -> None:
    if session.as_json:
        session.output().document({"state": state, "env_file": str(services.env_file)})
        return
    click.echo(
        f"PostgreSQL, Artemis and ZooKeeper are {state}. Their addresses, with a password, are in {services.env_file}:"
    )
    click.echo(f"  set -a; . {services.env_file}; set +a")


def _say(session: Session, services: "Services", state: str) -> None:
    if session.as_json:
        session.output().document({"state": state})
        return
    click.echo(f"PostgreSQL, Artemis and ZooKeeper of {services.data} are {state}.")


@contextmanager
def _explained() -> Iterator[None]:
    from rooms.embedded import EmbeddedError

    try:
        yield
    except EmbeddedError as exc:
        raise CliError(str(exc)) from exc
