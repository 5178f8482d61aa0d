"""Run the tests of the sender on both event loops."""

from tests.support.event_loops import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]
