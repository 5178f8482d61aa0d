"""Show a progress bar while a job runs or rows are counted."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rooms.cli.errors import CliError
from rooms.safe_text import terminal_safe

if TYPE_CHECKING:
    from rooms.cli.client import ApiClient

_POLL_S = 0.5
_UNFINISHED = {"queued", "running"}


def follow_job(client: "ApiClient", job: dict[str, Any], *, shown: bool) -> dict[str, Any]:
    """Return the job once it has ended. `shown`: with a bar, if standard error is a terminal."""
    path = f"/jobs/{job['id']}"
    with _progress_bar(shown=shown) as bar:
        task = bar.add_task(terminal_safe(str(job.get("kind", "job"))), total=None)
        while job["state"] in _UNFINISHED:
            bar.update(task, completed=job.get("done") or 0, total=job.get("total"))
            time.sleep(_POLL_S)
            job = client.call("GET", path)
    return job


@contextmanager
def progress_counter(label: str, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar without an end. Yield the function that sets its count."""
    with _progress_bar(shown=shown) as bar:
        task = bar.add_task(label, total=None)
        yield lambda count: bar.update(task, completed=count)


def raise_if_failed(job: dict[str, Any]) -> None:
    """Raise CliError if the job failed. A cancelled job did not fail."""
    if job["state"] == "failed":
        raise CliError(f"the job failed: {job.get('error') or 'no reason was recorded'}")


def _progress_bar(*, shown: bool) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not (shown and sys.stderr.isatty()),
    )
