"""Stores of magazines whose answers get lost: what was asked for was done, will be done later, or never was."""

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from delivery.magazines.aerospike_records import Bins
from delivery.magazines.kv_store import AmbiguousResultError, KvQueueStore, WriteOutcome
from rooms.domain.magazine import MagazineName, Slot
from rooms.errors import MagazineUnavailableError

_LATER: Final = 20


class DoubtfulStore:
    """A store in front of a real one.

    Of `share` of what it is asked to write the answer is lost; in a third each it was written, it
    is written later (when so many other calls were made), or never.
    """

    def __init__(self, real: KvQueueStore, *, share: float, seed: int) -> None:
        self._real = real
        self._share = share
        self._random = random.Random(seed)
        self._turn = threading.Lock()
        self._late: list[Callable[[], object]] = []
        self.lost = 0
        """Answers so far."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _fate(self) -> str:
        with self._turn:
            if self._random.random() >= self._share:
                return "answered"
            self.lost += 1
            return self._random.choice(("done", "late", "never"))

    def _later(self, call: Callable[[], object]) -> None:
        with self._turn:
            self._late.append(call)

    def catch_up(self, keep: int = 0) -> None:
        """Write what is still to be written, but for the last `keep`."""
        while True:
            with self._turn:
                if len(self._late) <= keep:
                    return
                call = self._late.pop(0)
            call()

    def _each(
        self, slots: Sequence[Slot], write: Callable[[list[int]], list[Any]], lost: Any
    ) -> list[Any]:
        """Every record of a batch has a fate of its own."""
        self.catch_up(_LATER)
        fates = [self._fate() for _ in slots]
        now = [at for at, fate in enumerate(fates) if fate in {"answered", "done"}]
        late = [at for at, fate in enumerate(fates) if fate == "late"]
        if late:
            self._later(lambda: write(late))
        found = dict(zip(now, write(now), strict=True))
        return [found[at] if fate == "answered" else lost for at, fate in enumerate(fates)]

    def _one(self, write: Callable[[], Any]) -> Any:
        self.catch_up(_LATER)
        match self._fate():
            case "answered":
                return write()
            case "done":
                write()
            case "late":
                self._later(write)
        return WriteOutcome.AMBIGUOUS

    def claim(
        self, name: MagazineName, shard: int, count: int, counters: Mapping[str, int]
    ) -> int | None:
        answer: int | WriteOutcome | None = self._one(
            lambda: self._real.claim(name, shard, count, counters)
        )
        if isinstance(answer, WriteOutcome):
            raise AmbiguousResultError("lost")
        return answer

    def move_fire(self, name: MagazineName, shard: int, *, expected: int, to: int) -> WriteOutcome:
        answer: WriteOutcome = self._one(
            lambda: self._real.move_fire(name, shard, expected=expected, to=to)
        )
        return answer

    def move_sweep(
        self, name: MagazineName, shard: int, *, expected: int, to: int, epoch: int, swept: int
    ) -> WriteOutcome:
        answer: WriteOutcome = self._one(
            lambda: self._real.move_sweep(
                name, shard, expected=expected, to=to, epoch=epoch, swept=swept
            )
        )
        return answer

    def create(
        self,
        name: MagazineName,
        slots: Sequence[Slot],
        bins: Sequence[Bins],
        lifetimes_s: Sequence[int | None],
    ) -> list[WriteOutcome]:
        return self._each(
            slots,
            lambda some: self._real.create(
                name,
                [slots[at] for at in some],
                [bins[at] for at in some],
                [lifetimes_s[at] for at in some],
            ),
            WriteOutcome.AMBIGUOUS,
        )

    def stamp(
        self,
        name: MagazineName,
        slots: Sequence[Slot],
        *,
        now_ms: int,
        call: str,
        before_ms: int | None,
    ) -> list[tuple[WriteOutcome, Bins]]:
        return self._each(
            slots,
            lambda some: self._real.stamp(
                name, [slots[at] for at in some], now_ms=now_ms, call=call, before_ms=before_ms
            ),
            (WriteOutcome.AMBIGUOUS, {}),
        )

    def mark_deleted(
        self,
        name: MagazineName,
        slots: Sequence[Slot],
        ids: Sequence[str | None],
        *,
        call: str,
        swept: bool,
    ) -> list[WriteOutcome]:
        return self._each(
            slots,
            lambda some: self._real.mark_deleted(
                name, [slots[at] for at in some], [ids[at] for at in some], call=call, swept=swept
            ),
            WriteOutcome.AMBIGUOUS,
        )

    def read(
        self, name: MagazineName, slots: Sequence[Slot], bins: Sequence[str]
    ) -> list[Bins | None]:
        if self._fate() != "answered":
            raise AmbiguousResultError("lost")
        return self._real.read(name, slots, bins)


class DoubtfulRuns:
    """Wrap the statements of the PostgreSQL adapter: a statement is applied wholly or not at all, and its answer is lost."""

    def __init__(self, real: Any, *, share: float, seed: int) -> None:
        self._real = real
        self._share = share
        self._random = random.Random(seed)
        self.lost = 0

    async def run(self, statement: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        if self._random.random() >= self._share:
            rows: list[tuple[Any, ...]] = await self._real.run(statement, parameters)
            return rows
        self.lost += 1
        if self._random.random() < 0.5:
            await self._real.run(statement, parameters)
        raise MagazineUnavailableError("lost")
