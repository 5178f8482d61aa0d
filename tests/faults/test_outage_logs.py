"""Test the log of an outage under load: one line when a store goes, one when it is back."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from rooms.cli.database import create_key
from rooms.domain.state_machine import Scope
from tests.support.local_servers import TestServer
from tests.support.polling import until
from tests.support.process_group import Crew
from tests.support.recovering_postgres import recovering
from tests.support.room import EVENT_TYPE, Place
from tests.support.service import START_S
from tests.support.webhook_sink import Sink

REQUESTS = 200
OTHERS = 10
"""Other lines that are allowed: each periodic task may log once that its term ended."""


def test_an_outage_under_load_is_two_lines(database: str, tmp_path: Path, sink: Sink) -> None:
    """API, worker and maintenance in one process all notice it; the failed requests are counted."""
    _, key = create_key(database, "default", "outage", [Scope.ADMIN])
    with recovering(database) as server:
        server.over.set()
        crew = Crew(url="", folder=tmp_path, _database_url=server.url)
        crew.http.headers["authorization"] = f"Bearer {key}"
        try:
            process = crew.start("standalone")
            crew.http.base_url = process.url

            def answers() -> bool:
                try:
                    return crew.http.get("/health/ready").status_code == httpx.codes.OK
                except httpx.TransportError:
                    return False

            until(answers, "the process to be ready", within_s=START_S)
            place = Place.open(crew, sink)
            hook, queue = place.push(), place.queue()
            place.publish(1)
            before = len(process.log.read_text().splitlines())
            server.crash()
            refused = server.refused
            for number in range(REQUESTS):
                answer = crew.call(
                    "POST", f"{place.at}/messages", {"event_type": EVENT_TYPE, "payload": number}
                )
                assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE, answer.text
            for path in (place.at, f"/subscriptions/{hook.id}", f"{place.at}/subscriptions"):
                answer = crew.http.get(f"/v1{path}")
                assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE, answer.text
            answer = crew.call("POST", f"/subscriptions/{queue}/pull", {})
            assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE, answer.text
            assert crew.http.get("/health/ready").status_code == httpx.codes.SERVICE_UNAVAILABLE
            assert "rooms_database_up 0.0" in crew.http.get("/metrics").text
            until(lambda: server.refused > refused + 20, "every part to notice")
            server.over.set()
            until(
                lambda: place.try_publish(2).status_code == httpx.codes.ACCEPTED,
                "publishes to be taken again",
            )
            until(
                lambda: "is back after" in process.log.read_text(),
                "the line that says that it is back",
            )
        finally:
            crew.end()
    lines = process.log.read_text().splitlines()[before:]
    log = "\n".join(lines)
    assert "Traceback" not in log
    warnings = [line for line in lines if " INFO " not in line]
    assert (
        len([line for line in warnings if "PostgreSQL is away" in line or "takes no work" in line])
        == 1
    ), log
    (back,) = [line for line in warnings if "is back after" in line]
    (count,) = re.findall(r"([\d,]+) requests were refused", back)
    assert int(count.replace(",", "")) >= REQUESTS
    assert len(warnings) <= OTHERS, log
    assert "broker" not in log, "PostgreSQL is named, though it is the broker as well"


def test_an_outage_of_zookeeper_is_two_lines_without_a_probe(
    database: str, tmp_path: Path, zookeeper_server: Callable[[], TestServer]
) -> None:
    """Kill it under requests. No probe and no scrape asks meanwhile or afterwards.

    Oracle: the first request that is answered again is in the log, with the outage's own duration.
    """
    zookeeper = zookeeper_server()
    _, key = create_key(database, "default", "outage", [Scope.PLATFORM])
    settings = {
        "ELECTION_URL": f"{zookeeper.url}?session_s=2",
        "ROOMS_FARM": f"outage-{os.getpid()}",
    }
    crew = Crew(url="", folder=tmp_path, _database_url=database, broker=settings)
    crew.http.headers["authorization"] = f"Bearer {key}"
    try:
        process = crew.start("standalone")

        def answers(expected: int) -> bool:
            try:
                return crew.http.get(f"{process.url}/v1/cluster").status_code == expected
            except httpx.TransportError:
                return False

        until(lambda: answers(httpx.codes.OK), "the cluster to be shown", within_s=START_S)
        began = time.monotonic()
        zookeeper.kill()
        for _ in range(3):
            until(lambda: answers(httpx.codes.SERVICE_UNAVAILABLE), "a request to be refused")
        zookeeper.start()
        until(lambda: answers(httpx.codes.OK), "the cluster to be shown again", within_s=START_S)
        until(
            lambda: "is back after" in process.log.read_text(),
            "the line that says that it is back",
        )
        # The process's own election ends with it, and may be later than the first answer.
        lasted = time.monotonic() - began
    finally:
        crew.end()
    lines = [line for line in process.log.read_text().splitlines() if "rooms.outages" in line]
    assert len(lines) == 2, "\n".join(lines)
    assert "The election's store is away: " in lines[0]
    (logged,) = re.findall(r"The election's store is back after (\d+) s; .*requests were", lines[1])
    assert int(logged) <= lasted + 1
