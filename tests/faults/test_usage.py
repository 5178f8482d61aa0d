"""Kill every process under load: afterwards usage equals the log."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from tests.support.api_client import Client
from tests.support.load import loading
from tests.support.polling import until
from tests.support.room import Place
from tests.support.service import PROCESSES, Service, running
from tests.support.usage_counts import counts_of_log, counts_of_table
from tests.support.webhook_sink import sinking

SEED = 20_261_123
ROUNDS = 2


def counts(service: Service) -> tuple[Any, Any]:
    """Return the counts of the log, and those of usage."""

    async def rows(statement: str) -> Sequence[Sequence[Any]]:
        return service.rows(statement)

    async def both() -> tuple[Any, Any]:
        return await counts_of_log(rows), await counts_of_table(rows)

    return asyncio.run(both())


def messages_of(table: Any) -> dict[str, int]:
    """Return the messages by application."""
    found: dict[str, int] = {}
    for (*_, application, name), count in table.items():
        if name == "messages":
            found[application] = found.get(application, 0) + count
    return found


def of_application(place: Place, name: str) -> httpx.Client:
    """Return a client with a key that is bound to an application."""
    body = {"name": name, "scopes": ["admin"], "application": name}
    key = place.service.post("/keys", body)["key"]
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=place.service.http.base_url, headers=headers, timeout=60)


def test_usage_equals_the_log_after_kills_of_every_process(tmp_path: Path) -> None:
    """Kill the API, the worker, maintenance and PostgreSQL in turn, while publishers go on.

    Once everything is quiet, the counts of every hour, organisation, event type and application are
    those of the log.
    """
    dice = random.Random(SEED)
    with (
        running(tmp_path, settings={"ROOMS_CLAIM_TTL_S": "3600"}) as service,
        sinking() as sink,
        ExitStack() as stack,
    ):
        place = Place.open(service, sink, delivery_delay_ms=50)
        place.push()
        stack.enter_context(http := of_application(place, "registry"))
        registry = replace(place, service=Client(http))
        queue = registry.queue()
        victims = [*PROCESSES, "upkeep"] * ROUNDS
        dice.shuffle(victims)
        with (
            loading(place, queue, publishers=1, pace_s=0.002) as load,
            loading(registry, queue, publishers=1, pace_s=0.002) as bound,
        ):
            loads = (load, bound)
            for victim in victims:
                service.await_another(victim, service.kill(victim))
                for one in loads:
                    one.await_progress()
            service.await_ready()
            for one in loads:
                one.end_publishing()
        assert [one.unexpected for one in loads] == [[], []]
        assert len(load.accepted) + len(bound.accepted) > 2 * len(victims)

        def equal() -> bool:
            log, table = counts(service)
            return bool(log == table and messages_of(table) == expected)

        expected = {"": len(load.accepted), "registry": len(bound.accepted)}

        until(equal, lambda: f"usage to equal the log: {counts(service)}", within_s=120)
