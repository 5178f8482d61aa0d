"""Watching what takes long, with a progress bar for people: a job until it ends, or rows as they are counted."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rooms.cli.errors import CliError
from rooms.terminal import terminal_safe

if TYPE_CHECKING:
    from rooms.cli.client import Client

_POLL_S = 0.5
_RUNNING = {"queued", "running"}


def follow(client: "Client", found: dict[str, Any], *, shown: bool) -> dict[str, Any]:
    """The job once it is over; `shown`: with a bar on standard error, where that is a terminal."""
    path = f"/jobs/{found['id']}"
    with _bar(shown=shown) as bar:
        task = bar.add_task(terminal_safe(str(found.get("kind", "job"))), total=None)
        while found["state"] in _RUNNING:
            bar.update(task, completed=found.get("done") or 0, total=found.get("total"))
            time.sleep(_POLL_S)
            found = client.call("GET", path)
    return found


@contextmanager
def counting(what: str, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar without an end; call what it gives with the number reached."""
    with _bar(shown=shown) as bar:
        task = bar.add_task(what, total=None)
        yield lambda count: bar.update(task, completed=count)


def check(found: dict[str, Any]) -> None:
    """CliError where the job failed. One that was cancelled ended as somebody wanted."""
    if found["state"] == "failed":
        raise CliError(f"the job failed: {found.get('error') or 'no reason was kept'}")


def _bar(*, shown: bool) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not (shown and sys.stderr.isatty()),
    )
