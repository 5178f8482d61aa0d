"""Kill every process under load: afterwards usage equals the log."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def test_usage_equals_the_log_after_kills_of_every_process(tmp_path: Path) -> None:
    """Kill the API, the worker, maintenance and PostgreSQL in turn, while publishers go on.

    Once everything is quiet, the counts of every hour, organisation and event type are those of the log.
    """
    dice = random.Random(SEED)
    with (
        running(tmp_path, settings={"ROOMS_CLAIM_TTL_S": "3600"}) as service,
        sinking() as sink,
    ):
        place = Place.open(service, sink, delivery_delay_ms=50)
        place.push()
        queue = place.queue()
        victims = [*PROCESSES, "upkeep"] * ROUNDS
        dice.shuffle(victims)
        with loading(place, queue, publishers=2, pace_s=0.002) as load:
            for victim in victims:
                service.await_another(victim, service.kill(victim))
                load.await_progress()
            service.await_ready()
            load.end_publishing()
        assert load.unexpected == []
        assert len(load.accepted) > len(victims)

        def equal() -> bool:
            log, table = counts(service)
            messages = sum(count for key, count in table.items() if key[-1] == "messages")
            return bool(log == table and messages == len(load.accepted))

        until(equal, lambda: f"usage to equal the log: {counts(service)}", within_s=120)
