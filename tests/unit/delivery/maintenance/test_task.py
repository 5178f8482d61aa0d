"""Waiting for the first of several events."""

import asyncio

import pytest

from delivery.maintenance.task import wait_first


async def fail() -> None:
    raise ConnectionError("cut")


async def test_the_error_of_the_first_to_end_is_raised() -> None:
    with pytest.raises(ConnectionError, match="cut"):
        await wait_first(asyncio.Event().wait(), fail())


async def test_what_has_not_ended_in_time_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def wait_in_vain() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    await wait_first(wait_in_vain(), timeout_s=0.01)
    assert cancelled.is_set()
