"""A suite of seeded attacks, and how it is run.

Case `n` of seed `s` depends on these two numbers only, so any failure can be run again by itself.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, Final

from rooms.loop_watchdog import Stall, watch_loop
from tests.support import stall_guard

_SHOWN: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """One surface under attack."""

    name: str
    cases: int
    """Number of cases that `make test` runs."""
    generate: Callable[[Random], Any]
    """Make one case from a seeded generator; its repr must show the whole input."""
    target: Callable[[str], AbstractAsyncContextManager[Callable[[Any], Awaitable[str]]]]
    """Open what is attacked, given the URL of a migrated database of its own. The result runs one case: it returns the kind of
    outcome, to be counted, and raises AssertionError where a promise was broken.
    """
    case_s: float = 10.0
    """A case that takes longer has failed."""


async def attack(
    suite: Suite,
    database_url: str,
    *,
    seed: int,
    cases: int | None = None,
    seconds: float | None = None,
) -> Counter[str]:
    """Run the suite until `cases` or `seconds` are over and return how often each kind of outcome was seen.

    AssertionError names the case that broke a promise, and the command that runs it again.
    """
    outcomes: Counter[str] = Counter()
    stalls: list[Stall] = []
    until = None if seconds is None else time.monotonic() + seconds
    async with suite.target(database_url) as run:
        with watch_loop(stalls.append, threshold_s=stall_guard.THRESHOLD_S):
            for number in count() if cases is None else range(cases):
                if until is not None and time.monotonic() >= until:
                    break
                await _run_case(suite, run, seed, number, outcomes)
                await asyncio.sleep(0)  # a target may wait for nothing, and each case is a turn
                _assert_none(stalls, f"{_again(suite, seed, number)}, or a case just before")
        _assert_none(stalls, f"{suite.name}, seed {seed}, the last cases")
    return outcomes


def _assert_none(stalls: list[Stall], where: str) -> None:
    """Fail where the loop stood still, but for what the attack itself did."""
    try:
        stall_guard.assert_none(stalls)
    except AssertionError as exc:
        raise AssertionError(f"{where}\n{exc}") from None


def _again(suite: Suite, seed: int, number: int) -> str:
    return f"python -m tests.faults.hostile {suite.name} --seed {seed} --case {number}"


async def replay(suite: Suite, database_url: str, *, seed: int, number: int) -> Counter[str]:
    """Run one case again."""
    outcomes: Counter[str] = Counter()
    async with suite.target(database_url) as run:
        await _run_case(suite, run, seed, number, outcomes)
    return outcomes


async def _run_case(
    suite: Suite,
    run: Callable[[Any], Awaitable[str]],
    seed: int,
    number: int,
    outcomes: Counter[str],
) -> None:
    case = suite.generate(Random(f"{suite.name}/{seed}/{number}"))
    try:
        async with asyncio.timeout(suite.case_s):
            outcomes[await run(case)] += 1
    except Exception as exc:
        again = _again(suite, seed, number)
        shown = repr(case)[:_SHOWN]
        raise AssertionError(f"{again}\n{type(exc).__name__}: {exc}\ncase: {shown}") from exc
