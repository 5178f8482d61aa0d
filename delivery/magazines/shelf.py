"""One magazine on a key-value store: how slots are loaded, fired and swept so that no hole swallows an entry.

    empty ──loader, create-only──► live ──stamp──► handed out ──mark──► gone (remembered for `mark_s`)
      └────firer or sweeper, create-only──► hole (remembered for `mark_s`): its loader takes another slot

Every step is a write that only one can win, and whoever repeats it in doubt knows its own: an id, a stamp, a mark,
a pointer's absolute value. The one that cannot tell, moving the load pointer, leaves a hole when it is repeated.
A loader that took longer than the store remembers holes for certain gives its slot up. One that took longer than a server
needs to restart confirms that the shard is still the one which gave it the slots.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from delivery.magazines.in_flight import InFlight
from delivery.magazines.records import (
    DELETED,
    FIRE_POINTER,
    FIRE_TS,
    FIRED,
    FIRED_BY,
    GONE,
    HOLE,
    ID,
    LIFE_BINS,
    LOAD_POINTER,
    LOAD_TS,
    LOADED,
    LOADED_BY,
    RELOADED,
    STORED_BINS,
    SWEPT,
    Bins,
    by_shard,
    entry_bins,
    lifetime_s,
    stored,
    sweep_bins,
)
from delivery.magazines.repetition import RESTART_S, Repetition
from delivery.magazines.store import Outcome, Store
from rooms.domain.magazine import MAX_BATCH, Entry, MagazineName, MagazineState, ShardState, Slot, Stored, Sweep
from rooms.errors import MagazineMissingError, MagazineUnavailableError, StaleEpochError, TooLargeError
from rooms.ports import Clock

_T = TypeVar("_T")
_AHEAD: Final = 16
"""So many slots beyond the load pointer are looked at by a sweep."""


@dataclass(slots=True, kw_only=True)
class Shelf:
    """Blocking and thread-safe; the adapter calls it on threads of its own. `loads`, `fires`: which shard is next; `calls`:
    names of calls that nobody else has.
    """

    name: MagazineName
    shards: int
    expires: bool
    store: Store
    clock: Clock
    repetition: Repetition
    loads: Iterator[int]
    fires: Iterator[int]
    calls: Iterator[str]
    sleep: Callable[[float], None] = time.sleep
    _seen: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By shard the fire and load pointers as they were last seen: a hint."""
    _in_flight: InFlight = field(default_factory=InFlight)

    def load(self, entries: Sequence[Entry], *, reloaded: bool = False) -> list[Slot]:
        """`Magazine.load`."""
        shard, call = next(self.loads) % self.shards, next(self.calls)
        homes: dict[int, Slot] = {}
        waiting = list(range(len(entries)))
        counters = {LOADED: len(entries)} | ({RELOADED: len(entries)} if reloaded else {})
        while waiting:
            claimed_s = self.clock.monotonic()
            claimed = dict(zip(waiting, self._claim(shard, len(waiting), counters), strict=True))
            counters = {}
            stood = self._put(claimed, entries, call)
            took_s = self.clock.monotonic() - claimed_s
            if took_s > self.repetition.patience_s:
                self._end([claimed[at] for at in stood], swept=False)
                continue
            if took_s > RESTART_S:
                self._confirm(shard, [claimed[at] for at in stood])
            homes |= {at: claimed[at] for at in stood}
            waiting = [at for at in waiting if at not in homes]
        return [homes[at] for at in range(len(entries))]

    def _claim(self, shard: int, count: int, counters: Mapping[str, int]) -> list[Slot]:
        first = self._again(lambda: self.store.claim(self.name, shard, count, counters))
        if first is None:
            raise self._missing()
        return [Slot(shard, first + number) for number in range(count)]

    def _put(self, homes: dict[int, Slot], entries: Sequence[Entry], call: str) -> set[int]:
        """Create-only; which ones stand. The others' slots are holes, or were filled in a life before the store was emptied.

        What meets its own id stands, and was perhaps fired meanwhile; the call's name says that it is this load's.
        """
        now_ms = self.clock.now_ms()
        stand: set[int] = set()
        waiting = list(homes)
        for attempt in self.repetition.attempts():
            outcomes = self.store.create(
                self.name,
                [homes[at] for at in waiting],
                [entry_bins(entries[at], now_ms, call) for at in waiting],
                [lifetime_s(entries[at], now_ms) if self.expires else None for at in waiting],
            )
            ended = dict(zip(waiting, outcomes, strict=True))
            if large := [at for at, outcome in ended.items() if outcome is Outcome.TOO_LARGE]:
                raise TooLargeError(f"the entry {entries[large[0]].id} is larger than a record may be")
            stand |= {at for at, outcome in ended.items() if outcome is Outcome.DONE}
            there = [at for at, outcome in ended.items() if outcome is Outcome.EXISTS]
            found = self._read([homes[at] for at in there], (ID, LOADED_BY))
            stand |= {
                at
                for at, bins in zip(there, found, strict=True)
                if bins and (bins.get(ID), bins.get(LOADED_BY)) == (entries[at].id, call)
            }
            waiting = [at for at, outcome in ended.items() if outcome is Outcome.DOUBT]
            if not waiting:
                return stand
            self._pause(attempt)
        raise MagazineUnavailableError(f"{len(waiting)} entries for {self.name} had no answer")

    def _confirm(self, shard: int, slots: Sequence[Slot]) -> None:
        """Raise an error where the shard does not know these slots any more, so that neither a firer nor a sweeper would
        come to their entries: its server was emptied, or lost what it had not flushed, after it gave them.
        """
        (meta,) = self._again(lambda: self.store.pointers(self.name, [shard]))
        if meta is None:
            raise self._missing()
        swept = self._sweep_state()[sweep_bins(self.name).pointers][str(shard)]
        below = [slot for slot in slots if slot.pointer < swept]
        ended = all(bins is not None and GONE in bins for bins in self._read(below, (GONE,)))
        if not ended or any(slot.pointer >= meta[LOAD_POINTER] for slot in slots):
            raise MagazineUnavailableError(f"shard {shard} of {self.name} was set back during a load")

    def fire(self, limit: int) -> list[Stored]:
        """`Magazine.fire`: first where something was seen, then everywhere."""
        taken: list[Stored] = []
        try:
            self._fire_from(dict(self._seen), limit, taken)
            while len(taken) < limit and self._fire_from(self._pointers(), limit, taken):
                pass
        except MagazineUnavailableError:
            if not taken:
                raise
        return taken

    def _fire_from(self, seen: dict[int, tuple[int, int]], limit: int, taken: list[Stored]) -> bool:
        """Fire from these shards into `taken`; whether others were faster somewhere, so that it is worth looking again."""
        turn, others = next(self.fires), False
        for shard in sorted(seen, key=lambda shard: (shard + turn) % self.shards):
            fire, load = seen[shard]
            while fire < load and len(taken) < limit:
                to = min(load, fire + limit - len(taken))
                if not self._move_fire(shard, fire, to):
                    self._seen.pop(shard, None)
                    others = True
                    break
                self._seen[shard] = to, load
                taken += self._fired([Slot(shard, pointer) for pointer in range(fire, to)])
                fire = to
        return others

    def _fired(self, slots: Sequence[Slot]) -> list[Stored]:
        got = self._stamp(slots, before_ms=None, fill=True)
        if len(got) < len(slots):
            self.store.add(self.name, {slots[0].shard: {FIRED: len(got) - len(slots)}})
        return got

    def _pointers(self) -> dict[int, tuple[int, int]]:
        found = self._again(lambda: self.store.pointers(self.name, range(self.shards)))
        if any(bins is None for bins in found):
            raise self._missing()
        self._seen = {
            shard: (bins[FIRE_POINTER], bins[LOAD_POINTER])
            for shard, bins in enumerate(found)
            if bins is not None and bins[FIRE_POINTER] < bins[LOAD_POINTER]
        }
        return {shard: (bins[FIRE_POINTER], bins[LOAD_POINTER]) for shard, bins in enumerate(found) if bins is not None}

    def _move_fire(self, shard: int, expected: int, to: int) -> bool:
        """Whether these slots may be ours. In doubt they may be: the stamps decide who gets what."""
        for attempt in self.repetition.attempts():
            match self.store.move_fire(self.name, shard, expected=expected, to=to):
                case Outcome.DONE:
                    return True
                case Outcome.FILTERED:
                    self._seen.pop(shard, None)
                    return attempt > 0
                case Outcome.MISSING:
                    raise self._missing()
                case _:
                    self._pause(attempt)
        raise MagazineUnavailableError(f"the fire pointer of {self.name} did not answer")

    def _stamp(self, slots: Sequence[Slot], *, before_ms: int | None, fill: bool) -> list[Stored]:
        """Hand entries out; `fill`: write holes where there is nothing. What stays in doubt is stuck."""
        call, now_ms, begun_s = next(self.calls), self.clock.now_ms(), self.clock.monotonic()
        got: dict[Slot, Bins] = {}
        waiting, doubted, attempt = list(slots), set[Slot](), 0
        while waiting:
            answers = dict(
                zip(
                    waiting,
                    self.store.stamp(self.name, waiting, now_ms=now_ms, call=call, before_ms=before_ms),
                    strict=True,
                )
            )
            got |= {slot: bins for slot, (outcome, bins) in answers.items() if outcome is Outcome.DONE}
            refused = [
                slot for slot, (outcome, _) in answers.items() if outcome is Outcome.FILTERED and slot in doubted
            ]
            for slot, bins in zip(refused, self._read(refused, (*STORED_BINS, FIRED_BY, GONE)), strict=True):
                if bins and GONE not in bins and bins.get(FIRED_BY) == call:
                    got[slot] = bins
            empty = [slot for slot, (outcome, _) in answers.items() if outcome is Outcome.MISSING] if fill else []
            doubtful = [slot for slot, (outcome, _) in answers.items() if outcome is Outcome.DOUBT]
            doubted |= set(doubtful)
            waiting = doubtful + [slot for slot, outcome in self._fill(empty).items() if outcome is not Outcome.DONE]
            if doubtful:
                if attempt == self.repetition.retries:
                    break
                self._pause(attempt)
                attempt += 1
        if waiting and not got:
            raise MagazineUnavailableError(f"{len(doubted)} slots of {self.name} did not answer")
        handed = [stored(slot, got[slot]) for slot in slots if slot in got]
        self._in_flight.add(handed, begun_s)
        return handed

    def _fill(self, slots: Sequence[Slot]) -> dict[Slot, Outcome]:
        """Write holes into empty slots; EXISTS: somebody slipped in."""
        if not slots:
            return {}
        bins, lifetime = {GONE: HOLE}, self.repetition.mark_s
        return dict(
            zip(
                slots,
                self.store.create(self.name, slots, [bins] * len(slots), [lifetime] * len(slots)),
                strict=True,
            )
        )

    def take(self, slots: Sequence[Slot], older_than_s: float | None) -> list[Stored]:
        """`Magazine.take`."""
        before_ms = None if older_than_s is None else self.clock.now_ms() - round(older_than_s * 1000)
        got = self._stamp(sorted(set(slots)), before_ms=before_ms, fill=False)
        counts = by_shard([one.slot for one in got])
        self.store.add(self.name, {shard: {FIRED: many} for shard, many in counts.items()})
        return got

    def delete(self, slots: Sequence[Slot], *, swept: bool) -> list[Slot]:
        """`Magazine.delete`."""
        ended = self._end(sorted(set(slots)), swept=swept)
        self.store.add(self.name, {shard: {DELETED: many} for shard, many in by_shard(ended).items()})
        return ended

    def _end(self, slots: Sequence[Slot], *, swept: bool) -> list[Slot]:
        if not slots:
            return []
        call = next(self.calls)
        ended: list[Slot] = []
        waiting, doubted = list(slots), set[Slot]()
        for attempt in self.repetition.attempts():
            ids = self._in_flight.ids(waiting, self.clock.monotonic())
            answers = dict(zip(waiting, self.store.mark(self.name, waiting, ids, call=call, swept=swept), strict=True))
            ended += [slot for slot, outcome in answers.items() if outcome is Outcome.DONE]
            refused = [slot for slot, outcome in answers.items() if outcome is Outcome.FILTERED and slot in doubted]
            found = self._read(refused, (GONE,))
            ended += [slot for slot, bins in zip(refused, found, strict=True) if bins and bins.get(GONE) == call]
            waiting = [slot for slot, outcome in answers.items() if outcome is Outcome.DOUBT]
            if not waiting:
                self._in_flight.discard(slots)
                return ended
            doubted |= set(waiting)
            self._pause(attempt)
        raise MagazineUnavailableError(f"{len(waiting)} slots of {self.name} did not answer")

    def reload(self, taken: Sequence[Stored]) -> list[Slot | None]:
        """`Magazine.reload`: first the new slot, then the end of the old one."""
        homes = self.load([one.entry for one in taken], reloaded=True)
        ended = set(self.delete([one.slot for one in taken], swept=False))
        late = [home for home, one in zip(homes, taken, strict=True) if one.slot not in ended]
        self.delete(late, swept=False)
        return [home if one.slot in ended else None for home, one in zip(homes, taken, strict=True)]

    def find(self, slots: Sequence[Slot]) -> list[Stored]:
        """`Magazine.find`."""
        found = zip(slots, self._read(slots, (*STORED_BINS, GONE)), strict=True)
        return [stored(slot, bins) for slot, bins in found if bins is not None and GONE not in bins]

    def peek(self, limit: int, after: Slot | None) -> list[Stored]:
        """`Magazine.peek`, up to the load pointers of this moment."""
        found: list[Stored] = []
        for slots in self.slots(after):
            found += self.find(slots)
            if len(found) >= limit:
                break
        return found[:limit]

    def count(self) -> int:
        """`Magazine.count`."""
        return sum(
            bins is not None and GONE not in bins for slots in self.slots() for bins in self._read(slots, LIFE_BINS)
        )

    def slots(self, after: Slot | None = None) -> Iterator[list[Slot]]:
        """Every slot from the sweep pointers to the load pointers, in batches."""
        swept = self._sweep_state()[sweep_bins(self.name).pointers]
        loads = self._again(lambda: self.store.pointers(self.name, range(self.shards)))
        batch: list[Slot] = []
        for shard, bins in enumerate(loads):
            if bins is None:
                raise self._missing()
            first = swept[str(shard)]
            if after is not None and shard <= after.shard:
                first = bins[LOAD_POINTER] if shard < after.shard else max(first, after.pointer + 1)
            for pointer in range(first, bins[LOAD_POINTER]):
                batch.append(Slot(shard, pointer))
                if len(batch) == MAX_BATCH:
                    yield batch
                    batch = []
        yield batch

    def remains(self) -> Iterator[list[Slot]]:
        """`slots`, and those below the sweep pointers that are still remembered as done."""
        yield from self.slots()
        swept = self._sweep_state()[sweep_bins(self.name).pointers]
        for shard in range(self.shards):
            for end in range(swept[str(shard)], 0, -MAX_BATCH):
                batch = [Slot(shard, pointer) for pointer in range(max(0, end - MAX_BATCH), end)]
                if not any(self._read(batch, (GONE,))):
                    break
                yield batch

    def gather(self, shard: int, first: int, end: int) -> None:
        """Of a shard whose pointers were lost: what is left in these slots waits again, at the end of the magazine. Looks
        no further than to a batch in which nothing is.
        """
        while first < end:
            slots = [Slot(shard, at) for at in range(first, min(end, first + MAX_BATCH))]
            if not any(bins is not None for bins in self._read(slots, (LOAD_TS,))):
                return
            self.reload(self.find(slots))
            first += MAX_BATCH

    def sweep(self, shard: int, *, epoch: int, older_than_s: float, limit: int) -> Sweep:
        """`Magazine.sweep` (row C6): the epoch is written before anything is handed out."""
        record, bins = self._sweep_state(), sweep_bins(self.name)
        pointer = record[bins.pointers][str(shard)]
        self._check_epoch(shard, record[bins.epochs][str(shard)], epoch)
        (meta,) = self._again(lambda: self.store.pointers(self.name, [shard]))
        if meta is None:
            raise self._missing()
        before_ms = self.clock.now_ms() - round(older_than_s * 1000)
        slots = [Slot(shard, at) for at in range(pointer, min(pointer + limit, meta[FIRE_POINTER]))]
        to, swept, young, stuck = pointer, 0, False, list[Slot]()
        for slot, life in zip(slots, self._lives(slots), strict=True):
            if life is None:
                young = True  # somebody slipped in just now
            elif GONE not in life:
                young = (life.get(FIRE_TS) or life[LOAD_TS]) >= before_ms
                stuck += [] if young else [slot]
            elif not stuck:
                to, swept = slot.pointer + 1, swept + bool(life.get(SWEPT))
            if young:
                break
        self._move_sweep(shard, expected=pointer, to=to, epoch=epoch, swept=swept)
        if not young and to == meta[FIRE_POINTER] < meta[LOAD_POINTER]:
            self._pass_over(shard, meta[FIRE_POINTER], min(to + limit, meta[LOAD_POINTER]))
        if len(slots) < limit:
            self._raise_load(shard, meta[LOAD_POINTER])
        taken = self._stamp(stuck, before_ms=before_ms, fill=False) if stuck else []
        return Sweep(taken=taken, pointer=to, more=len(slots) == limit and not young)

    def _raise_load(self, shard: int, load: int) -> None:
        """Move the load pointer over entries beyond it: a server that died had flushed them, and the pointer it had not.
        Without this a firer comes to them only when others are loaded behind them.
        """
        found = self._read([Slot(shard, load + at) for at in range(_AHEAD)], (LOAD_TS, GONE))
        alive = [load + at for at, bins in enumerate(found) if bins and LOAD_TS in bins and GONE not in bins]
        if not alive:
            return
        (meta,) = self._again(lambda: self.store.pointers(self.name, [shard]))
        if meta is not None and meta[LOAD_POINTER] == load:
            self._claim(shard, alive[-1] + 1 - load, {LOADED: len(alive)})

    def _lives(self, slots: Sequence[Slot]) -> list[Bins | None]:
        """What is alive, or gone; empty slots become holes on the way. None: a loader was faster."""
        return self._closed(slots, self._read(slots, LIFE_BINS))

    def _closed(self, slots: Sequence[Slot], found: Sequence[Bins | None]) -> list[Bins | None]:
        filled = self._fill([slot for slot, bins in zip(slots, found, strict=True) if bins is None])
        hole: Bins = {GONE: HOLE}
        return [
            bins if bins is not None else hole if filled[slot] is Outcome.DONE else None
            for slot, bins in zip(slots, found, strict=True)
        ]

    def _pass_over(self, shard: int, fire: int, end: int) -> None:
        """Where entries were taken by choice and ended, nobody need fire over them; nor will a sweep wait for it. What is
        not remembered any more is closed as a firer closes it.
        """
        slots = [Slot(shard, at) for at in range(fire, end)]
        lives = self._read(slots, LIFE_BINS)
        stop = next((at for at, bins in enumerate(lives) if bins is not None and GONE not in bins), len(lives))
        lives = self._closed(slots[:stop], lives[:stop])
        dead = next((at for at, bins in enumerate(lives) if bins is None), len(lives))
        if dead and self._move_fire(shard, fire, fire + dead):
            self.store.add(self.name, {shard: {FIRED: -dead}})

    def _move_sweep(self, shard: int, *, expected: int, to: int, epoch: int, swept: int) -> None:
        bins = sweep_bins(self.name)
        for attempt in self.repetition.attempts():
            match self.store.move_sweep(self.name, shard, expected=expected, to=to, epoch=epoch, swept=swept):
                case Outcome.DONE:
                    return
                case Outcome.FILTERED:
                    record = self._sweep_state()
                    held, at = record[bins.epochs][str(shard)], record[bins.pointers][str(shard)]
                    self._check_epoch(shard, held, epoch)
                    if held == epoch and at >= to:
                        return  # this call, unanswered, or another of this epoch
                    expected, to, swept = at, max(at, to), 0
                case Outcome.MISSING:
                    raise self._missing()
                case _:
                    self._pause(attempt)
        raise MagazineUnavailableError(f"the sweep pointer of {self.name} did not answer")

    def _sweep_state(self) -> Bins:
        record = self._again(lambda: self.store.sweep_state(self.name))
        if record is None or sweep_bins(self.name).pointers not in record:
            raise self._missing()
        return record

    def _check_epoch(self, shard: int, held: int, epoch: int) -> None:
        if held > epoch:
            raise StaleEpochError(f"shard {shard} of {self.name} is swept under epoch {held}, not {epoch}")

    def state(self) -> MagazineState:
        """`Magazine.state`."""
        record, bins = self._sweep_state(), sweep_bins(self.name)
        metas = self._again(lambda: self.store.pointers(self.name, range(self.shards)))
        if any(meta is None for meta in metas):
            raise self._missing()
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

    def _read(self, slots: Sequence[Slot], bins: Sequence[str]) -> list[Bins | None]:
        return self._again(lambda: self.store.read(self.name, slots, bins)) if slots else []

    def _pause(self, attempt: int) -> None:
        if attempt < self.repetition.retries:
            self.sleep(self.repetition.sleep_s)

    def _again(self, call: Callable[[], _T]) -> _T:
        return self.repetition.again(call, sleep=self.sleep)

    def _missing(self) -> MagazineMissingError:
        return MagazineMissingError(f"there is no magazine {self.name}")
