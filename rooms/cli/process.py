"""`rooms serve`, `worker`, `upkeep`, `relay` and `migrate`: one process each; `rooms standalone`: all in one."""

import click

from rooms.cli.errors import CliError
from rooms.cli.session import Command, Session, pass_session


@click.command(cls=Command)
@pass_session
def serve(session: Session) -> None:
    """Run the API on ROOMS_LISTEN, until SIGTERM or Ctrl-C."""
    from rooms.cli.backends import joined_installation
    from rooms.composition.api import run_api

    joined = joined_installation(session)
    run_api(joined.settings, joined.database_url)


@click.command(cls=Command)
@pass_session
def worker(session: Session) -> None:
    """Run a push worker, until SIGTERM or Ctrl-C. Start as many as there are cores."""
    from rooms.cli.backends import joined_installation
    from rooms.composition.worker import run_worker

    joined = joined_installation(session)
    run_worker(joined.settings, joined.database_url)


@click.command(cls=Command)
@pass_session
def upkeep(session: Session) -> None:
    """Run the upkeep, until SIGTERM or Ctrl-C. Several share the work."""
    from rooms.cli.backends import joined_installation
    from rooms.composition.upkeep import run_upkeep

    joined = joined_installation(session)
    run_upkeep(joined.settings, joined.database_url)


@click.command(cls=Command)
@pass_session
def relay(session: Session) -> None:
    """Run a relay to the broker, until SIGTERM or Ctrl-C. Only where BROKER_URL is not PostgreSQL; any number of them."""
    from rooms.cli.backends import joined_installation
    from rooms.composition.relay import run_relay

    joined = joined_installation(session)
    if not joined.settings.relayed:
        raise CliError(
            "BROKER_URL is PostgreSQL: workers take what is queued themselves, and there is nothing to relay"
        )
    run_relay(joined.settings, joined.database_url)


@click.command(cls=Command)
@click.option("--standby", is_flag=True, help="Only while no other standby is in charge; then at once.")
@pass_session
def standalone(session: Session, *, standby: bool) -> None:
    """Run API, push worker, upkeep (and relay) in this one process, until SIGTERM or Ctrl-C."""
    from rooms.cli.backends import joined_installation
    from rooms.composition.standalone import run_standalone

    joined = joined_installation(session)
    run_standalone(joined.settings, joined.database_url, standby=standby)


@click.command(cls=Command)
@pass_session
def migrate(session: Session) -> None:
    """Bring the database (DATABASE_URL, or the embedded one while it runs) to this version's schema."""
    from rooms.cli.database import migrated

    migrated(session.answering_database_url())
    if session.as_json:
        session.output().document({"migrated": True})
    else:
        session.output().line("the database has this version's schema")
