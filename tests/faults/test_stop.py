"""Stop the service while work is in progress."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.support.polling import PATIENCE_S, until
from tests.support.service import running

WAIT_MS = 30_000
ROOM = {"name": "r", "delivery_delay_ms": 1, "delivery_delay_multiplier": 1, "delivery_attempts": 0}


def test_a_poll_that_waits_is_answered_when_the_service_stops(memory: Path) -> None:
    """Answer a waiting poll when the process stops.

    Oracle: the poll, which would wait 30 s, gets its empty answer from a process that ends in order (`stop` checks
    exit 0), instead of a connection that breaks after the drain.
    """
    with running(memory) as service, ThreadPoolExecutor(1) as pool:
        room = service.post("/rooms", ROOM)["id"]
        queue = service.post(f"/rooms/{room}/subscriptions", {"name": "q", "type": "PULL"})["id"]
        polling = pool.submit(
            httpx.post,
            f"{service.url}/v1/subscriptions/{queue}/pull",
            json={"wait_ms": WAIT_MS},
            headers={"authorization": f"Bearer {service.key}"},
            timeout=WAIT_MS / 1000 + 5,
        )
        until(lambda: service.metric("rooms_pulls_total") == 1, "the poll to wait")
        service.stop()
        answer = polling.result(PATIENCE_S)
    assert answer.status_code == httpx.codes.OK
    assert answer.json() == {"messages": []}
