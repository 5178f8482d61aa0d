"""The sandbox, with real processes: deadlines, memory, crashes, and that others are not held up."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop

from rooms.errors import TransientError
from rooms.metrics import Metrics
from rooms.publishing.sandbox import frames
from rooms.publishing.sandbox.client import CheckSandbox
from rooms.publishing.sandbox.frames import (
    Check,
    FilterCheck,
    FilterMessage,
    SchemaCheck,
    SchemaCompile,
)
from tests.support.polling import until
from tests.support.sandboxes import idle_sandbox

SLOW: dict[str, Any] = {"not": {"pattern": "(?=(a+)+b)c"}}
"""The library bounds how long a pattern backtracks at one place of a text, but not at all of them."""
DEEP = "a" * 100_000
"""Takes a minute to match."""
UNIQUE = {"uniqueItems": True}


def schema_check(schema: Any, payload: Any) -> SchemaCheck:
    return SchemaCheck(json.dumps(schema).encode(), json.dumps(payload).encode(), "payload")


def filter_check(expression: str, payload: Any) -> FilterCheck:
    message = FilterMessage(json.dumps(payload).encode(), {}, "e", 1, None, 4)
    return FilterCheck(expression, message)


def slow_filter_check() -> FilterCheck:
    """Return one that takes a second, far more than its share."""
    return filter_check(
        "payload.s.contains(payload.t)", {"s": "a" * 400_000, "t": "a" * 200_000 + "b"}
    )


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def sandbox(metrics: Metrics) -> AsyncIterator[CheckSandbox]:
    async with idle_sandbox(cpu_ms=200, metrics=metrics) as sandbox:
        yield sandbox


async def test_what_fits_and_what_does_not(sandbox: CheckSandbox) -> None:
    checks: list[Check] = [
        schema_check(UNIQUE, [1, 2]),
        schema_check(UNIQUE, [1, 1]),
        filter_check("payload.a == 1", {"a": 1}),
        filter_check("payload.a == 1", {"a": 2}),
        filter_check("payload.b == 1", {"a": 2}),
        SchemaCompile(b'{"$ref":"http://127.0.0.1:1/x"}', "schema"),
        SchemaCompile(json.dumps(SLOW).encode(), "schema"),
    ]
    found = await sandbox.run("a", checks)
    assert [[field for field, _, _ in one.problems] for one in found] == [
        [],
        ["payload"],
        [],
        [],
        [],
        ["schema"],
        [],
    ]
    assert [one.matches for one in found[2:5]] == [True, False, True]
    assert found[4].error
    assert not any(one.late for one in found)


async def test_checks_of_several_jobs_get_their_outcomes_in_order(
    sandbox: CheckSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a check that ends its process ends none of the other jobs."""
    monkeypatch.setattr(frames, "MAX_JOB_CHECKS", 3)
    checks: list[Check] = [filter_check(f"payload == {n % 2}", 1) for n in range(10)]
    checks.insert(4, slow_filter_check())
    found = await sandbox.run("a", checks)
    assert [one.late for one in found] == [n == 4 for n in range(11)]
    assert [one.matches for one in found if not one.late] == [False, True] * 5
    assert len(sandbox._processes) == 1


async def test_what_takes_too_long_is_ended_and_the_rest_is_done(
    sandbox: CheckSandbox, metrics: Metrics
) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    (found,) = await sandbox.run("a", [schema_check(SLOW, DEEP)])
    ticking.cancel()
    assert found.late
    assert ticks > 10, "the loop was held up"
    filters = [filter_check("payload == 1", 1), filter_check("payload == 2", 1)]
    assert [one.matches for one in await sandbox.run("a", filters)] == [True, False]
    assert b'rooms_sandbox_checks_total{outcome="late"} 1.0' in metrics.render()
    assert b'rooms_sandbox_checks_total{outcome="done"} 2.0' in metrics.render()


async def test_a_check_that_is_late_leaves_time_to_the_filters_behind_it(
    sandbox: CheckSandbox,
) -> None:
    found = await sandbox.run(
        "a", [filter_check("payload == 2", 1), slow_filter_check(), filter_check("payload == 2", 1)]
    )
    assert [one.late for one in found] == [False, True, False]
    assert [found[0].matches, found[2].matches] == [False, False]


async def test_memory_is_bounded(metrics: Metrics) -> None:
    async with CheckSandbox(
        processes=1, cpu_ms=60_000, memory_bytes=1 << 26, metrics=metrics
    ) as sandbox:
        listed = schema_check(
            {"type": "array", "items": {"anyOf": [{"$ref": "#"}] * 2}},
            json.loads("[" * 18 + "1" + "]" * 18),
        )
        found = await sandbox.run("a", [listed, filter_check("payload == 2", 1)])
    assert found[0].late
    assert not found[0].final, "that it does not fit is known"
    assert not found[1].matches


async def test_a_process_that_another_ended_is_replaced_and_its_check_done_again(
    sandbox: CheckSandbox,
) -> None:
    assert [one.late for one in await sandbox.run("a", [schema_check(UNIQUE, [1])])] == [False]
    for process in list(sandbox._processes):
        os.kill(process._process.pid, signal.SIGKILL)
    (found,) = await sandbox.run("a", [schema_check(UNIQUE, [1, 1])])
    assert found.problems
    assert not found.late


@pytest.mark.parametrize("create_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_process_that_no_longer_reads_is_replaced(
    metrics: Metrics, create_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """The pipe to a process that dies is closed before its end is noticed."""

    async def run_twice() -> None:
        async with idle_sandbox(cpu_ms=200, metrics=metrics) as sandbox:
            for _ in range(2):
                (found,) = await sandbox.run("a", [schema_check(UNIQUE, [1, 1])])
                assert found.problems
                (process,) = sandbox._processes
                process._jobs.transport.abort()
                await asyncio.sleep(0)
                assert process._process.returncode is None

    with asyncio.Runner(loop_factory=create_loop) as runner:
        runner.run(run_twice())


async def test_a_process_that_cannot_start_refuses_no_message(
    sandbox: CheckSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as during an upgrade: the publisher can try again."""
    monkeypatch.setattr("rooms.publishing.sandbox.client.sys.executable", "/bin/false")
    with pytest.raises(TransientError, match="exit status 1"):
        await sandbox.run("a", [schema_check(UNIQUE, [1])])


async def test_one_organisation_cannot_take_all_processes(sandbox: CheckSandbox) -> None:
    """With one that has a long queue of checks that end late, another gets its answer before that queue is through."""
    order: list[str] = []

    async def run(tenant: str, check: Check) -> None:
        await sandbox.run(tenant, [check])
        order.append(tenant)

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(run("hostile", schema_check(SLOW, DEEP)))
        await asyncio.sleep(0)
        group.create_task(run("other", schema_check(UNIQUE, [1])))
    assert order.index("other") <= 1


async def test_a_cancelled_check_ends_its_process(sandbox: CheckSandbox) -> None:
    task = asyncio.create_task(sandbox.run("a", [schema_check(SLOW, DEEP)]))
    await asyncio.to_thread(until, lambda: sandbox._processes, "a process")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not sandbox._processes
    assert not (await sandbox.run("a", [schema_check(UNIQUE, [1])]))[0].problems
