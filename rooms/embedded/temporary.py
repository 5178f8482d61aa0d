"""A PostgreSQL for the length of a test run."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rooms.embedded.errors import StartError
from rooms.embedded.identity import Identity
from rooms.embedded.server import EmbeddedPostgres

_START_TIMEOUT_S = 60
_STOP_TIMEOUT_S = 15
_POLL_S = 0.02


@contextmanager
def temporary_postgres(data: Path, *, worn: Identity | None = None) -> Iterator[str]:
    """Start PostgreSQL on the folder, give the address of its database, and stop it in the end. The folder stays. `worn`
    is the identity to run it under, found out when not given.

    To be called from the main thread: the server ends with the thread that started it. Raises StartError when it
    does not answer within a minute.
    """
    server = EmbeddedPostgres(data, worn=worn)
    server.prepare()
    log = data / "postgres.log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            server.command(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd="/",
            env=server.environment,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not server.answers():
            if process.poll() is not None or time.monotonic() > deadline:
                raise StartError(f"PostgreSQL did not start:\n{log.read_text()}")
            time.sleep(_POLL_S)
        yield server.url
    finally:
        process.send_signal(server.stop_signal)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_TIMEOUT_S)
