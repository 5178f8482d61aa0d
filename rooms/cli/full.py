"""Implement `rooms full`: PostgreSQL, Artemis and ZooKeeper on this machine, and Rooms on them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.errors import CliError

if TYPE_CHECKING:
    from rooms.local import Child
    from rooms.local.services import LocalServices

_START_TIMEOUT_S: Final = 300.0
_STOP_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1
_KEEP_COMMAND: Final = ("full", "keep")


@click.group(cls=Group)
def full() -> None:
    """Run PostgreSQL, Artemis and ZooKeeper on this machine, and Rooms on them.

    Needs a JDK 17 or later, and Maven.
    """


@full.command("up")
@pass_session
def up(session: CliSession) -> None:
    """Start the servers in the background. Their addresses are in ROOMS_DATA/full.env."""
    with _translate_errors():
        services = _find_services(session)
        if started := _prepare(services):
            _start_background_supervisor(services)
        else:
            _wait_until(services.is_ready, "the servers, which another command started,")
        _report_addresses(session, services, "started" if started else "running already")


@full.command("down")
@pass_session
def down(session: CliSession) -> None:
    """Stop the servers that `up` started. Their data stays."""
    from rooms.local import process_table
    from rooms.local.pidfile import MARKER_VARIABLE, child_marker, lock_data_dir, lock_owner

    with _translate_errors():
        services = _find_services(session)
        owner_pid = lock_owner(services.folder)
        if owner_pid is None:
            if services.folder.is_dir():
                # Locking the folder also ends what a killed supervisor left.
                with lock_data_dir(services.folder):
                    pass
            _report_state(session, services, "not running")
            return
        if owner_pid in process_table.find_by_environment(
            MARKER_VARIABLE, child_marker(services.data)
        ):
            raise CliError("the servers belong to `make run-full`: stop that with Ctrl-C")
        if not process_table.terminate(owner_pid, (signal.SIGTERM, _STOP_TIMEOUT_S)):
            raise CliError(
                f"process {owner_pid}, which supervises the servers, did not stop; "
                f"its logs are in {services.folder}/log"
            )
        _report_state(session, services, "stopped")


@full.command("run")
@pass_session
def run(session: CliSession) -> None:
    """Run Rooms on the servers, until Ctrl-C. Starts them if needed."""
    from rooms.cli.dev import supervise
    from rooms.errors import SettingsError
    from rooms.local.pidfile import lock_data_dir
    from rooms.settings import read_settings

    with _translate_errors():
        services = _find_services(session)
        # The lock refuses a second supervisor, and ends what a killed one left, before the
        # servers are checked.
        services.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        with lock_data_dir(services.data):
            started = _prepare(services)
        if not started:
            _wait_until(services.is_ready, "the servers, which another command started,")
        environment = {**os.environ, **services.addresses()}
        try:
            settings = read_settings(environment)
        except SettingsError as exc:
            raise click.UsageError("\n".join(exc.problems)) from exc
        supervise(
            session,
            settings,
            environment,
            foundations=[_servers_child(services)] if started else [],
        )


@full.command("keep", hidden=True)
@pass_session
def keep(session: CliSession) -> None:
    """Supervise the servers until SIGTERM. `up` starts it in the background, `run` as a child."""
    import asyncio

    from rooms.local import Supervisor

    with _translate_errors():
        services = _find_services(session)
        asyncio.run(
            Supervisor(
                data=services.folder, children=services.children(), environment=dict(os.environ)
            ).run()
        )


def _find_services(session: CliSession) -> "LocalServices":
    from rooms.local.services import LocalServices

    return LocalServices(data=session.settings().data)


def _prepare(services: "LocalServices") -> bool:
    """Prepare a start. Return False if another supervisor runs the servers already."""
    from rooms.local import DataInUseError

    services.fetch()
    try:
        services.write_addresses()
    except DataInUseError:
        return False
    return True


def _start_background_supervisor(services: "LocalServices") -> None:
    from rooms.local.pidfile import lock_owner

    logs = services.folder / "log"
    logs.mkdir(mode=0o700, exist_ok=True)
    log_file = logs / "keeper.log"
    with log_file.open("wb") as file:
        process = subprocess.Popen(
            _command(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "ROOMS_DATA": str(services.data.absolute())},
            start_new_session=True,
        )

    def ready() -> bool:
        if process.poll() is not None and lock_owner(services.folder) is None:
            raise CliError(
                f"the servers did not start:\n{log_file.read_text(errors='replace').strip()}"
            )
        return services.is_ready()

    _wait_until(ready, "the servers")


def _servers_child(services: "LocalServices") -> "Child":
    import asyncio

    from rooms.local import Child

    async def is_ready() -> bool:
        return await asyncio.to_thread(services.is_ready)

    return Child(name="servers", argv=_command(), ready=is_ready, ready_timeout_s=_START_TIMEOUT_S)


def _command() -> list[str]:
    return [sys.executable, "-m", "rooms", *_KEEP_COMMAND]


def _wait_until(ready: Callable[[], bool], subject: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not ready():
        if time.monotonic() > deadline:
            raise CliError(f"{subject} did not answer within {_START_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)


def _report_addresses(session: CliSession, services: "LocalServices", state: str) -> None:
    if session.as_json:
        session.output().document({"state": state, "env_file": str(services.env_file)})
        return
    click.echo(
        f"PostgreSQL, Artemis and ZooKeeper are {state}. "
        f"Their addresses, with a password, are in {services.env_file}:"
    )
    click.echo(f"  set -a; . {services.env_file}; set +a")


def _report_state(session: CliSession, services: "LocalServices", state: str) -> None:
    if session.as_json:
        session.output().document({"state": state})
        return
    click.echo(f"PostgreSQL, Artemis and ZooKeeper of {services.data} are {state}.")


@contextmanager
def _translate_errors() -> Iterator[None]:
    from rooms.local import EmbeddedError

    try:
        yield
    except EmbeddedError as exc:
        raise CliError(str(exc)) from exc
