"""Run a process that serves handler queues."""

import asyncio
import sys
from importlib import import_module
from pathlib import Path

from delivery.handlers.api import Handlers
from delivery.handlers.service import serve_handlers
from rooms.app.process import run, stop_on_signals
from rooms.app.stores import open_own_magazines, process_registration
from rooms.clock import SystemClock
from rooms.metrics import Metrics
from rooms.settings import Settings


def load_handlers(target: str) -> Handlers:
    """Return the object `module:name`, importable from the current directory too.

    ValueError: it is not a `Handlers`.
    """
    module, _, name = target.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(import_module(module), name or "handlers")
    except (ImportError, AttributeError) as exc:
        raise ValueError(f"{target}: {exc}") from exc
    if not isinstance(found, Handlers) or not len(found):
        raise ValueError(
            f"{target} has no handlers: name a delivery.handlers.Handlers with at least one"
        )
    return found


def run_handlers(
    settings: Settings, database_url: str, handlers: Handlers, *, organisation: str | None = None
) -> None:
    """Serve the organisation's queues that have a handler, until SIGTERM or SIGINT.

    Messages under way are completed.
    """
    run(
        "handlers",
        lambda metrics: _serve(settings, database_url, handlers, organisation, metrics),
        settings,
        database_url,
    )


async def _serve(
    settings: Settings,
    database_url: str,
    handlers: Handlers,
    organisation: str | None,
    metrics: Metrics,
) -> None:
    stop = asyncio.Event()
    async with (
        open_own_magazines(settings, database_url) as magazines,
        process_registration(settings, database_url, "handlers"),
    ):
        with stop_on_signals(stop.set):
            await serve_handlers(
                handlers,
                organisation=organisation,
                database_url=database_url,
                magazines=magazines,
                clock=SystemClock(),
                metrics=metrics,
                stop=stop,
            )
