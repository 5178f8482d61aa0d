"""Keep one magazine on a key-value store: its pointers, and how it is loaded, fired and swept.

The slots' writes (`kv_slots.py`) and the pointers' absolute values are safe to repeat. Moving the
load pointer is not: repeated after an ambiguous result it leaves a hole, which a firer closes.
A loader that took longer than the store certainly remembers holes gives its slots up. One that took
longer than a server needs to restart confirms that the shard still has the slots it gave.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from delivery.magazines.aerospike_records import (
    DELETED,
    FIRE_POINTER,
    FIRE_TS,
    FIRED,
    GONE,
    LOAD_POINTER,
    LOAD_TS,
    LOADED,
    RELOADED,
    STATE_BINS,
    SWEPT,
    Bins,
    count_by_shard,
    sweep_bins,
    to_time,
)
from delivery.magazines.kv_slots import KvSlots
from delivery.magazines.kv_store import RESTART_S, WriteOutcome
from rooms.domain.magazine import (
    MAX_BATCH,
    Entry,
    MagazineState,
    ShardState,
    Slot,
    StoredEntry,
    SweepBatch,
)
from rooms.errors import (
    MagazineUnavailableError,
    StaleEpochError,
)

_LAST_POINTER: Final = (1 << 62) - 1
_LOAD_LOOKAHEAD: Final = 16
"""Slots beyond the load pointer that a sweep reads."""


@dataclass(slots=True, kw_only=True)
class KvMagazine(KvSlots):
    """Load, fire and sweep, blocking and thread-safe. `loads`, `fires` choose the next shard."""

    shards: int
    loads: Iterator[int]
    fires: Iterator[int]
    _known_pointers: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By shard the fire and load pointers that were last read: a hint."""

    def load(self, entries: Sequence[Entry], *, reloaded: bool = False) -> list[Slot]:
        """`Magazine.load`."""
        shard, call = next(self.loads) % self.shards, next(self.call_ids)
        homes: dict[int, Slot] = {}
        waiting = list(range(len(entries)))
        counters = {LOADED: len(entries)} | ({RELOADED: len(entries)} if reloaded else {})
        while waiting:
            claimed_s = self.clock.monotonic()
            claimed = dict(
                zip(waiting, self._claim_slots(shard, len(waiting), counters), strict=True)
            )
            counters = {}
            written = self._write_entries(claimed, entries, call)
            took_s = self.clock.monotonic() - claimed_s
            if took_s > self.retry_policy.claim_trust_s:
                self._mark_deleted([claimed[at] for at in written], swept=False)
                continue
            if took_s > RESTART_S:
                self._confirm_slots(shard, [claimed[at] for at in written])
            homes |= {at: claimed[at] for at in written}
            waiting = [at for at in waiting if at not in homes]
        return [homes[at] for at in range(len(entries))]

    def _claim_slots(self, shard: int, count: int, counters: Mapping[str, int]) -> list[Slot]:
        first = self._retry(lambda: self.store.claim(self.name, shard, count, counters))
        if first is None:
            raise self._missing_error()
        return [Slot(shard, first + number) for number in range(count)]

    def _confirm_slots(self, shard: int, slots: Sequence[Slot]) -> None:
        """Raise an error where the shard lost these slots after it gave them.

        Its server was emptied, or lost what it had not flushed: neither a firer nor a sweeper would
        reach their entries.
        """
        (meta,) = self._retry(lambda: self.store.pointers(self.name, [shard]))
        if meta is None:
            raise self._missing_error()
        swept = self._sweep_state()[sweep_bins(self.name).pointers][str(shard)]
        below = [slot for slot in slots if slot.pointer < swept]
        ended = all(bins is not None and GONE in bins for bins in self._read(below, (GONE,)))
        if not ended or any(slot.pointer >= meta[LOAD_POINTER] for slot in slots):
            raise MagazineUnavailableError(
                f"shard {shard} of {self.name} was set back during a load"
            )

    def fire(self, limit: int, below: Mapping[int, int] | None = None) -> list[StoredEntry]:
        """`Magazine.fire`: first by the known pointers, then from all shards."""
        taken: list[StoredEntry] = []
        try:
            self._fire_from(dict(self._known_pointers), below, limit, taken)
            while len(taken) < limit and self._fire_from(
                self._read_pointers(), below, limit, taken
            ):
                pass
        except MagazineUnavailableError:
            if not taken:
                raise
        return taken

    def _fire_from(
        self,
        pointers: dict[int, tuple[int, int]],
        below: Mapping[int, int] | None,
        limit: int,
        taken: list[StoredEntry],
    ) -> bool:
        """Fire from these shards into `taken`; return whether another firer won a shard."""
        turn, lost = next(self.fires), False
        for shard in sorted(pointers, key=lambda shard: (shard + turn) % self.shards):
            fire, load = pointers[shard]
            end = load if below is None else min(load, below.get(shard, 0))
            while fire < end and len(taken) < limit:
                to = min(end, fire + limit - len(taken))
                if not self._move_fire(shard, fire, to):
                    self._known_pointers.pop(shard, None)
                    lost = True
                    break
                self._known_pointers[shard] = to, load
                taken += self._stamp_fired([Slot(shard, pointer) for pointer in range(fire, to)])
                fire = to
        return lost

    def _stamp_fired(self, slots: Sequence[Slot]) -> list[StoredEntry]:
        got = self._stamp(slots, before_ms=None, fill=True)
        if len(got) < len(slots):
            self.store.add_counts(self.name, {slots[0].shard: {FIRED: len(got) - len(slots)}})
        return got

    def _read_pointers(self) -> dict[int, tuple[int, int]]:
        found = self._retry(lambda: self.store.pointers(self.name, range(self.shards)))
        if any(bins is None for bins in found):
            raise self._missing_error()
        self._known_pointers = {
            shard: (bins[FIRE_POINTER], bins[LOAD_POINTER])
            for shard, bins in enumerate(found)
            if bins is not None and bins[FIRE_POINTER] < bins[LOAD_POINTER]
        }
        return {
            shard: (bins[FIRE_POINTER], bins[LOAD_POINTER])
            for shard, bins in enumerate(found)
            if bins is not None
        }

    def _move_fire(self, shard: int, expected: int, to: int) -> bool:
        """Return whether this call may have the slots; stamps decide after an ambiguous move."""
        for attempt in self.retry_policy.attempts():
            match self.store.move_fire(self.name, shard, expected=expected, to=to):
                case WriteOutcome.DONE:
                    return True
                case WriteOutcome.FILTERED:
                    self._known_pointers.pop(shard, None)
                    return attempt > 0
                case WriteOutcome.MISSING:
                    raise self._missing_error()
                case _:
                    self._pause(attempt)
        raise MagazineUnavailableError(f"the fire pointer of {self.name} did not answer")

    def take(self, slots: Sequence[Slot], older_than_s: float | None) -> list[StoredEntry]:
        """`Magazine.take`."""
        before_ms = (
            None if older_than_s is None else self.clock.now_ms() - round(older_than_s * 1000)
        )
        got = self._stamp(sorted(set(slots)), before_ms=before_ms, fill=False)
        counts = count_by_shard([one.slot for one in got])
        self.store.add_counts(self.name, {shard: {FIRED: many} for shard, many in counts.items()})
        return got

    def delete(self, slots: Sequence[Slot], *, swept: bool) -> list[Slot]:
        """`Magazine.delete`."""
        ended = self._mark_deleted(sorted(set(slots)), swept=swept)
        self.store.add_counts(
            self.name, {shard: {DELETED: many} for shard, many in count_by_shard(ended).items()}
        )
        return ended

    def reload(self, taken: Sequence[StoredEntry]) -> list[Slot | None]:
        """`Magazine.reload`: first the new slot, then the deletion of the old one."""
        homes = self.load([one.entry for one in taken], reloaded=True)
        ended = set(self.delete([one.slot for one in taken], swept=False))
        late = [home for home, one in zip(homes, taken, strict=True) if one.slot not in ended]
        self.delete(late, swept=False)
        return [home if one.slot in ended else None for home, one in zip(homes, taken, strict=True)]

    def peek(self, limit: int, after: Slot | None) -> list[StoredEntry]:
        """`Magazine.peek`: first the slots, since a batch of them may have a gibibyte of bodies."""
        found: list[StoredEntry] = []
        while len(found) < limit:
            wanted = limit - len(found)
            slots = self.peek_slots(wanted, after)
            found += self.find(slots)  # some may have been deleted meanwhile
            if len(slots) < wanted:
                break
            after = slots[-1]
        return found

    def peek_slots(self, limit: int, after: Slot | None) -> list[Slot]:
        """`Magazine.peek_slots`, up to the load pointers of this moment."""
        found: list[Slot] = []
        for slots in self.slots(after):
            found += [
                slot
                for slot, bins in zip(slots, self._read(slots, STATE_BINS), strict=True)
                if bins is not None and GONE not in bins
            ]
            if len(found) >= limit:
                break
        return found[:limit]

    def count(self) -> int:
        """`Magazine.count`."""
        return sum(
            bins is not None and GONE not in bins
            for slots in self.slots()
            for bins in self._read(slots, STATE_BINS)
        )

    def oldest_loaded_at(self) -> datetime | None:
        """`Magazine.oldest_loaded_at`."""
        firsts: list[Slot] = []
        after: Slot | None = None
        while found := self.peek_slots(1, after):
            firsts += found
            after = Slot(found[0].shard, _LAST_POINTER)
        loaded = [bins for bins in self._read(firsts, (LOAD_TS,)) if bins]
        return min((to_time(bins[LOAD_TS]) for bins in loaded if LOAD_TS in bins), default=None)

    def slots(self, after: Slot | None = None) -> Iterator[list[Slot]]:
        """Yield every slot from the sweep pointers to the load pointers, in batches."""
        swept = self._sweep_state()[sweep_bins(self.name).pointers]
        loads = self._retry(lambda: self.store.pointers(self.name, range(self.shards)))
        batch: list[Slot] = []
        for shard, bins in enumerate(loads):
            if bins is None:
                raise self._missing_error()
            first = swept[str(shard)]
            if after is not None and shard <= after.shard:
                first = bins[LOAD_POINTER] if shard < after.shard else max(first, after.pointer + 1)
            for pointer in range(first, bins[LOAD_POINTER]):
                batch.append(Slot(shard, pointer))
                if len(batch) == MAX_BATCH:
                    yield batch
                    batch = []
        yield batch

    def remaining_slots(self) -> Iterator[list[Slot]]:
        """Yield `slots`, and those below the sweep pointers that are remembered as deleted."""
        yield from self.slots()
        swept = self._sweep_state()[sweep_bins(self.name).pointers]
        for shard in range(self.shards):
            for end in range(swept[str(shard)], 0, -MAX_BATCH):
                batch = [Slot(shard, pointer) for pointer in range(max(0, end - MAX_BATCH), end)]
                if not any(self._read(batch, (GONE,))):
                    break
                yield batch

    def recover_entries(self, shard: int, first: int, end: int) -> None:
        """Reload what is left in these slots of a shard that lost its pointers.

        Stops at the first batch of empty slots.
        """
        while first < end:
            slots = [Slot(shard, at) for at in range(first, min(end, first + MAX_BATCH))]
            if not any(bins is not None for bins in self._read(slots, (LOAD_TS,))):
                return
            self.reload(self.find(slots))
            first += MAX_BATCH

    def sweep(self, shard: int, *, epoch: int, older_than_s: float, limit: int) -> SweepBatch:
        """`Magazine.sweep`: the epoch is written before an entry is handed out."""
        record, bins = self._sweep_state(), sweep_bins(self.name)
        pointer = record[bins.pointers][str(shard)]
        self._check_epoch(shard, record[bins.epochs][str(shard)], epoch)
        (meta,) = self._retry(lambda: self.store.pointers(self.name, [shard]))
        if meta is None:
            raise self._missing_error()
        before_ms = self.clock.now_ms() - round(older_than_s * 1000)
        slots = [Slot(shard, at) for at in range(pointer, min(pointer + limit, meta[FIRE_POINTER]))]
        to, swept, young, stuck = pointer, 0, False, list[Slot]()
        for slot, state in zip(slots, self._entry_states(slots), strict=True):
            if state is None:
                young = True  # a loader has just written it
            elif GONE not in state:
                young = (state.get(FIRE_TS) or state[LOAD_TS]) >= before_ms
                stuck += [] if young else [slot]
            elif not stuck:
                to, swept = slot.pointer + 1, swept + bool(state.get(SWEPT))
            if young:
                break
        self._move_sweep(shard, expected=pointer, to=to, epoch=epoch, swept=swept)
        if not young and to == meta[FIRE_POINTER] < meta[LOAD_POINTER]:
            self._skip_deleted(shard, meta[FIRE_POINTER], min(to + limit, meta[LOAD_POINTER]))
        if len(slots) < limit:
            self._raise_load_pointer(shard, meta[LOAD_POINTER])
        taken = self._stamp(stuck, before_ms=before_ms, fill=False) if stuck else []
        return SweepBatch(entries=taken, pointer=to, is_full=len(slots) == limit and not young)

    def _raise_load_pointer(self, shard: int, load: int) -> None:
        """Move the load pointer over entries beyond it.

        A server that died may have flushed them and not the pointer. Without this a firer reaches
        them only when others are loaded behind them.
        """
        found = self._read(
            [Slot(shard, load + at) for at in range(_LOAD_LOOKAHEAD)], (LOAD_TS, GONE)
        )
        live = [
            load + at
            for at, bins in enumerate(found)
            if bins and LOAD_TS in bins and GONE not in bins
        ]
        if not live:
            return
        (meta,) = self._retry(lambda: self.store.pointers(self.name, [shard]))
        if meta is not None and meta[LOAD_POINTER] == load:
            self._claim_slots(shard, live[-1] + 1 - load, {LOADED: len(live)})

    def _entry_states(self, slots: Sequence[Slot]) -> list[Bins | None]:
        """Return the slots' states; fill empty ones with holes. None: a loader was faster."""
        return self._fill_holes(slots, self._read(slots, STATE_BINS))

    def _skip_deleted(self, shard: int, fire: int, end: int) -> None:
        """Move the fire pointer over entries that were taken by slot and deleted.

        A sweep then need not wait for a firer. Slots that are no longer remembered are filled with
        holes, as a firer does.
        """
        slots = [Slot(shard, at) for at in range(fire, end)]
        states = self._read(slots, STATE_BINS)
        stop = next(
            (at for at, bins in enumerate(states) if bins is not None and GONE not in bins),
            len(states),
        )
        states = self._fill_holes(slots[:stop], states[:stop])
        dead = next((at for at, bins in enumerate(states) if bins is None), len(states))
        if dead and self._move_fire(shard, fire, fire + dead):
            self.store.add_counts(self.name, {shard: {FIRED: -dead}})

    def _move_sweep(self, shard: int, *, expected: int, to: int, epoch: int, swept: int) -> None:
        bins = sweep_bins(self.name)
        for attempt in self.retry_policy.attempts():
            match self.store.move_sweep(
                self.name, shard, expected=expected, to=to, epoch=epoch, swept=swept
            ):
                case WriteOutcome.DONE:
                    return
                case WriteOutcome.FILTERED:
                    record = self._sweep_state()
                    held, at = record[bins.epochs][str(shard)], record[bins.pointers][str(shard)]
                    self._check_epoch(shard, held, epoch)
                    if held == epoch and at >= to:
                        return  # an earlier attempt of this call, or another call of this epoch
                    expected, to, swept = at, max(at, to), 0
                case WriteOutcome.MISSING:
                    raise self._missing_error()
                case _:
                    self._pause(attempt)
        raise MagazineUnavailableError(f"the sweep pointer of {self.name} did not answer")

    def _sweep_state(self) -> Bins:
        record = self._retry(lambda: self.store.sweep_state(self.name))
        if record is None or sweep_bins(self.name).pointers not in record:
            raise self._missing_error()
        return record

    def _check_epoch(self, shard: int, held: int, epoch: int) -> None:
        if held > epoch:
            raise StaleEpochError(
                f"shard {shard} of {self.name} is swept under epoch {held}, not {epoch}"
            )

    def state(self) -> MagazineState:
        """`Magazine.state`."""
        record, bins = self._sweep_state(), sweep_bins(self.name)
        metas = self._retry(lambda: self.store.pointers(self.name, range(self.shards)))
        if any(meta is None for meta in metas):
            raise self._missing_error()
        return MagazineState(
            name=self.name,
            shards=tuple(
                ShardState(
                    shard=shard,
                    load_pointer=meta[LOAD_POINTER],
                    fire_pointer=meta[FIRE_POINTER],
                    sweep_pointer=record[bins.pointers][str(shard)],
                    epoch=record[bins.epochs][str(shard)],
                    loaded=meta.get(LOADED, 0),
                    fired=meta.get(FIRED, 0),
                    deleted=meta.get(DELETED, 0),
                    reloaded=meta.get(RELOADED, 0),
                )
                for shard, meta in enumerate(metas)
                if meta is not None
            ),
            swept=record.get(bins.counter, 0),
        )
