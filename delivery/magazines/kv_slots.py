"""Write the slots of a magazine on a key-value store: single records, safe to repeat.

    empty ──loader, create-only──► live ──stamp──► fired ──mark──► gone
      └────firer or sweeper, create-only──► hole: its loader takes another slot

Marks and holes are remembered for `mark_s`. Only one writer can win each write. A writer that
repeats one after an ambiguous result recognises its own earlier attempt by an id, a stamp or a
mark.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar

from delivery.magazines.aerospike_records import (
    FIRED_BY,
    GONE,
    HOLE,
    ID,
    LOADED_BY,
    STORED_BINS,
    Bins,
    entry_bins,
    to_stored_entry,
    ttl_s,
)
from delivery.magazines.kv_store import RESTART_S, KvStore, StoreRetryPolicy, WriteOutcome
from rooms.domain.magazine import Entry, MagazineName, Slot, StoredEntry
from rooms.errors import MagazineMissingError, MagazineUnavailableError, TooLargeError
from rooms.ports import Clock

_MAX_ENTRIES: Final = 100_000
"""Above this the oldest ids are dropped: deletions of their slots name no id."""


class FiredEntryIds:
    """Remember ids of entries that this process fired, by slot. Thread-safe.

    A server that loses its last claims when it is killed gives their slots to other entries. The
    deletion of an entry that was fired before must not delete the new one, so it names the id. A
    deletion that is sooner than a server can restart need not name it, and costs less.
    """

    def __init__(self, *, max_entries: int = _MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._ids_by_slot: OrderedDict[Slot, tuple[str, float]] = OrderedDict()

    def add(self, fired: Iterable[StoredEntry], at_s: float) -> None:
        """Remember these entries; `at_s`: a monotonic time before the store handed them out."""
        for one in fired:
            self._ids_by_slot[one.slot] = one.entry.id, at_s
        while len(self._ids_by_slot) > self._max_entries:
            with suppress(KeyError):  # another thread was faster
                self._ids_by_slot.popitem(last=False)

    def ids(self, slots: Sequence[Slot], now_s: float) -> list[str | None]:
        """Return the ids that a deletion of these slots must name.

        None: nothing was fired from the slot, or too recently for a server to have restarted.
        """
        found = (self._ids_by_slot.get(slot) for slot in slots)
        return [None if one is None or now_s - one[1] < RESTART_S else one[0] for one in found]

    def discard(self, slots: Iterable[Slot]) -> None:
        """Drop the ids of these slots."""
        for slot in slots:
            self._ids_by_slot.pop(slot, None)


_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class KvSlots:
    """Write slots, blocking and thread-safe. `call_ids`: names of calls, unique everywhere."""

    name: MagazineName
    expires: bool
    store: KvStore
    clock: Clock
    retry_policy: StoreRetryPolicy
    call_ids: Iterator[str]
    sleep: Callable[[float], None] = time.sleep
    _fired_ids: FiredEntryIds = field(default_factory=FiredEntryIds)

    def find(self, slots: Sequence[Slot]) -> list[StoredEntry]:
        """`Magazine.find`."""
        found = zip(slots, self._read(slots, (*STORED_BINS, GONE)), strict=True)
        return [
            to_stored_entry(slot, bins)
            for slot, bins in found
            if bins is not None and GONE not in bins
        ]

    def _write_entries(
        self, claimed: dict[int, Slot], entries: Sequence[Entry], call: str
    ) -> set[int]:
        """Write entries create-only; return which were written.

        The others' slots are holes, or were filled before the store was emptied. A slot with the
        entry's id and this call's name was written by an earlier attempt, and may have been fired.
        """
        now_ms = self.clock.now_ms()
        written: set[int] = set()
        waiting = list(claimed)
        for attempt in self.retry_policy.attempts():
            outcomes = self.store.create(
                self.name,
                [claimed[at] for at in waiting],
                [entry_bins(entries[at], now_ms, call) for at in waiting],
                [ttl_s(entries[at], now_ms) if self.expires else None for at in waiting],
            )
            ended = dict(zip(waiting, outcomes, strict=True))
            if large := [at for at, outcome in ended.items() if outcome is WriteOutcome.TOO_LARGE]:
                raise TooLargeError(
                    f"the entry {entries[large[0]].id} is larger than a record may be"
                )
            written |= {at for at, outcome in ended.items() if outcome is WriteOutcome.DONE}
            present = [at for at, outcome in ended.items() if outcome is WriteOutcome.EXISTS]
            found = self._read([claimed[at] for at in present], (ID, LOADED_BY))
            written |= {
                at
                for at, bins in zip(present, found, strict=True)
                if bins and (bins.get(ID), bins.get(LOADED_BY)) == (entries[at].id, call)
            }
            waiting = [at for at, outcome in ended.items() if outcome is WriteOutcome.AMBIGUOUS]
            if not waiting:
                return written
            self._pause(attempt)
        raise MagazineUnavailableError(f"no answer for {len(waiting)} entries of {self.name}")

    def _stamp(
        self, slots: Sequence[Slot], *, before_ms: int | None, fill: bool
    ) -> list[StoredEntry]:
        """Stamp entries as fired; `fill` writes holes. Those that stay ambiguous become stuck."""
        call, now_ms, started_s = next(self.call_ids), self.clock.now_ms(), self.clock.monotonic()
        got: dict[Slot, Bins] = {}
        waiting, asked, attempt = list(slots), set[Slot](), 0
        while waiting:
            answers = dict(
                zip(
                    waiting,
                    self.store.stamp(
                        self.name, waiting, now_ms=now_ms, call=call, before_ms=before_ms
                    ),
                    strict=True,
                )
            )
            got |= {
                slot: bins
                for slot, (outcome, bins) in answers.items()
                if outcome is WriteOutcome.DONE
            }
            refused = [
                slot
                for slot, (outcome, _) in answers.items()
                if outcome is WriteOutcome.FILTERED and slot in asked
            ]
            for slot, bins in zip(
                refused, self._read(refused, (*STORED_BINS, FIRED_BY, GONE)), strict=True
            ):
                if bins and GONE not in bins and bins.get(FIRED_BY) == call:
                    got[slot] = bins
            empty = (
                [slot for slot, (outcome, _) in answers.items() if outcome is WriteOutcome.MISSING]
                if fill
                else []
            )
            ambiguous = [
                slot for slot, (outcome, _) in answers.items() if outcome is WriteOutcome.AMBIGUOUS
            ]
            asked |= set(ambiguous)
            waiting = ambiguous + [
                slot
                for slot, outcome in self._write_holes(empty).items()
                if outcome is not WriteOutcome.DONE
            ]
            if ambiguous:
                if attempt == self.retry_policy.retries:
                    break
                self._pause(attempt)
                attempt += 1
        if waiting and not got:
            raise MagazineUnavailableError(f"no answer for {len(asked)} slots of {self.name}")
        fired = [to_stored_entry(slot, got[slot]) for slot in slots if slot in got]
        self._fired_ids.add(fired, started_s)
        return fired

    def _write_holes(self, slots: Sequence[Slot]) -> dict[Slot, WriteOutcome]:
        """Write holes into empty slots; EXISTS: a loader was faster."""
        if not slots:
            return {}
        bins, lifetime = {GONE: HOLE}, self.retry_policy.mark_s
        return dict(
            zip(
                slots,
                self.store.create(self.name, slots, [bins] * len(slots), [lifetime] * len(slots)),
                strict=True,
            )
        )

    def _fill_holes(
        self, slots: Sequence[Slot], states: Sequence[Bins | None]
    ) -> list[Bins | None]:
        filled = self._write_holes(
            [slot for slot, bins in zip(slots, states, strict=True) if bins is None]
        )
        hole: Bins = {GONE: HOLE}
        return [
            bins if bins is not None else hole if filled[slot] is WriteOutcome.DONE else None
            for slot, bins in zip(slots, states, strict=True)
        ]

    def _mark_deleted(self, slots: Sequence[Slot], *, swept: bool) -> list[Slot]:
        if not slots:
            return []
        call = next(self.call_ids)
        ended: list[Slot] = []
        waiting, asked = list(slots), set[Slot]()
        for attempt in self.retry_policy.attempts():
            ids = self._fired_ids.ids(waiting, self.clock.monotonic())
            answers = dict(
                zip(
                    waiting,
                    self.store.mark_deleted(self.name, waiting, ids, call=call, swept=swept),
                    strict=True,
                )
            )
            ended += [slot for slot, outcome in answers.items() if outcome is WriteOutcome.DONE]
            refused = [
                slot
                for slot, outcome in answers.items()
                if outcome is WriteOutcome.FILTERED and slot in asked
            ]
            found = self._read(refused, (GONE,))
            ended += [
                slot
                for slot, bins in zip(refused, found, strict=True)
                if bins and bins.get(GONE) == call
            ]
            waiting = [
                slot for slot, outcome in answers.items() if outcome is WriteOutcome.AMBIGUOUS
            ]
            if not waiting:
                self._fired_ids.discard(slots)
                return ended
            asked |= set(waiting)
            self._pause(attempt)
        raise MagazineUnavailableError(f"no answer for {len(waiting)} slots of {self.name}")

    def _read(self, slots: Sequence[Slot], bins: Sequence[str]) -> list[Bins | None]:
        return self._retry(lambda: self.store.read(self.name, slots, bins)) if slots else []

    def _pause(self, attempt: int) -> None:
        if attempt < self.retry_policy.retries:
            self.sleep(self.retry_policy.sleep_s)

    def _retry(self, call: Callable[[], _T]) -> _T:
        return self.retry_policy.call_with_retries(call, sleep=self.sleep)

    def _missing_error(self) -> MagazineMissingError:
        return MagazineMissingError(f"there is no magazine {self.name}")
