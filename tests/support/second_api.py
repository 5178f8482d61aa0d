"""Run another process of the API of a running service, changed by a module of the tests."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rooms.local.services import free_port
from tests.support.api_client import is_live
from tests.support.polling import until
from tests.support.service import STOP_S, Service, environment_of


@contextmanager
def second_api(
    service: Service, module: str, log: Path, *, port: int | None = None
) -> Iterator[int]:
    """Run `python -m MODULE serve` on the service's data, and yield its port."""
    port = port or free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "serve"],
            env=environment_of(service.data, port),
            stdout=output,
            stderr=output,
        )
    try:

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            return is_live(f"http://127.0.0.1:{port}")

        until(answers, "the other process of the API")
        yield port
    finally:
        process.terminate()
        process.wait(STOP_S)
