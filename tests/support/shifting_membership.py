"""A membership whose epochs a test sets."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Self


class ShiftingMembership:
    """Hold partitions in the epochs that a test sets, without an election."""

    def __init__(self, epochs: dict[str, int]) -> None:
        self._epochs = epochs
        self._change = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def epoch(self, partition: str) -> int | None:
        return self._epochs.get(partition)

    def set_partitions(self, partitions: Sequence[str]) -> None:
        self._epochs |= dict.fromkeys(partitions, 1)

    def wait_changed(self) -> Coroutine[Any, Any, object]:
        return self._change.wait()

    def set_epochs(self, epochs: dict[str, int]) -> None:
        self._epochs = epochs
        change, self._change = self._change, asyncio.Event()
        change.set()
