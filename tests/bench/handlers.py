"""Handler queues, as their users see them: messages put in by REST, and handled by a process of `rooms handlers`.

One message in ten is refused by its handler and has to be in the sideline afterwards, all others have to be gone. Aerospike
runs in memory on this machine where there is one (`asd` on the PATH or AEROSPIKE_URL).
"""

# ruff: noqa: T201 what a bench measures is printed

import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from rooms.domain.magazine import MAX_BATCH, MAX_CONSUMERS
from tests.bench.figures import Run
from tests.bench.plan import Lines, Plan
from tests.bench.service import BenchError, Service, running
from tests.support.aerospike_server import REASON, aerospike_address

MESSAGES: Final = 50_000
_QUEUE: Final = "bench"
_PATIENCE_S: Final = 600.0


def handlers(plan: Plan) -> Iterator[Lines]:
    """Every store of magazines; one process with a hundred consumers."""
    with ExitStack() as stack:
        (plan.folder / "aerospike").mkdir()
        aerospike_url = stack.enter_context(aerospike_address(plan.folder / "aerospike"))
        if not aerospike_url:
            print(f"  handlers: {REASON}", flush=True)
        for _ in range(plan.runs):
            for store, url in (("postgresql", None), ("aerospike", aerospike_url)):
                if store == "postgresql" or url:
                    # A client of its own, so that a server that stays has nothing of an earlier
                    # run.
                    settings = (
                        {"MAGAZINE_URL": url, "ROOMS_CLIENT": f"bench-{secrets.token_hex(4)}"}
                        if url
                        else {}
                    )
                    with running(plan.folder, settings=settings) as service:
                        lines = _measured(service, plan.some(MESSAGES))
                    yield {f"handlers {store}: {what}": run for what, run in lines.items()}


def _measured(service: Service, messages: int) -> Lines:
    service.post("/queues", {"name": _QUEUE, "concurrency": MAX_CONSUMERS, "shovel": None})
    began = time.monotonic()
    for start in range(0, messages, MAX_BATCH):
        batch = [{"payload": {"n": n}} for n in range(start, min(start + MAX_BATCH, messages))]
        service.post(f"/queues/{_QUEUE}/messages/batch", {"messages": batch})
    load = Run(values={"per_s": messages / (time.monotonic() - began)})
    process = subprocess.Popen(
        [sys.executable, "-m", "rooms", "handlers", "tests.bench.handled:handlers"],
        cwd=Path(__file__).parents[2],
        env=dict(service.environment),
    )
    try:
        _until(lambda: _depth(service, _QUEUE) < messages, process)
        began, left = time.monotonic(), _depth(service, _QUEUE)
        _until(lambda: _depth(service, _QUEUE) == 0, process)
        handle = Run(values={"per_s": left / (time.monotonic() - began)})
    finally:
        process.terminate()
        process.wait(60)
    refused, wanted = _depth(service, f"{_QUEUE}_SIDELINE"), len(range(0, messages, 10))
    reported = f"{refused:,} of {messages:,} were refused and rest in the sideline"
    (handle.verified if refused == wanted else handle.faults).append(reported)
    return {"load": load, "handle": handle}


def _depth(service: Service, magazine: str) -> int:
    answer = service.api.get(f"/v1/magazines/{magazine}")
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return int(found["depth"])


def _until(look: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    pause, until = threading.Event(), time.monotonic() + _PATIENCE_S
    while not look():
        if process.poll() is not None:
            raise BenchError(f"rooms handlers ended with code {process.returncode}")
        if time.monotonic() > until:
            raise BenchError(f"the queue is not empty after {_PATIENCE_S:g} s")
        pause.wait(0.1)
