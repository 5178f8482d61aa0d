"""Test how sign-ins through a trusted proxy wait for each other."""

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, Final

import pytest

from rooms.console import sign_in_limit
from rooms.errors import RateLimitedError

_AT_A_TIME: Final = 2
_PROXY: Final = ("10.0.0.1", 4000)
_CLIENT: Final = ("203.0.113.7", 0)


def make_limit() -> sign_in_limit.SignInLimit:
    services: Any = SimpleNamespace(
        clock=SimpleNamespace(monotonic=lambda: 0.0),
        callers=SimpleNamespace(is_proxy=lambda client: client == _PROXY),
    )
    return sign_in_limit.SignInLimit(services, _AT_A_TIME, "too many tries")


async def test_a_try_behind_slow_ones_is_refused_after_a_short_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sign_in_limit, "MAX_WAIT_S", 0.01)
    limited = make_limit()
    async with AsyncExitStack() as slow:
        for _ in range(_AT_A_TIME):
            await slow.enter_async_context(limited.attempt(_PROXY))
        for _ in range(3):
            with pytest.raises(RateLimitedError, match="too many tries"):
                async with asyncio.timeout(5), limited.attempt(_PROXY):
                    pytest.fail("it ran")
        async with limited.attempt(_CLIENT):
            pass
    for _ in range(2 * _AT_A_TIME):
        async with limited.attempt(_PROXY):
            pass


async def test_a_try_waits_for_one_that_ends() -> None:
    limited = make_limit()
    ran = asyncio.Event()

    async def run() -> None:
        async with limited.attempt(_PROXY):
            ran.set()

    async with AsyncExitStack() as others:
        for _ in range(_AT_A_TIME):
            await others.enter_async_context(limited.attempt(_PROXY))
        waiting = asyncio.create_task(run())
        await asyncio.sleep(0)
        assert not ran.is_set()
    await waiting
    assert ran.is_set()


async def test_a_client_that_leaves_takes_no_place_with_it() -> None:
    limited = make_limit()
    async with AsyncExitStack() as others:
        for _ in range(_AT_A_TIME):
            await others.enter_async_context(limited.attempt(_PROXY))
        waiting = asyncio.create_task(others.enter_async_context(limited.attempt(_PROXY)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    async with AsyncExitStack() as all_places:
        for _ in range(_AT_A_TIME):
            await all_places.enter_async_context(limited.attempt(_PROXY))


async def test_a_failed_try_gives_its_place_back() -> None:
    limited = make_limit()
    for _ in range(_AT_A_TIME + 1):
        with pytest.raises(ValueError, match="failed"):
            async with limited.attempt(_PROXY):
                raise ValueError("failed")
