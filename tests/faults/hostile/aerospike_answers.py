"""Aerospike's client answering anything at all: codes, generations, records that are not there, batches that are too short.

What must hold: only what a node wrote, of generation 1 or more, is called done; only what a node said is not there is called
missing; all else is doubt or a refusal, and no other error comes out.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from aerospike import exception
from aerospike_helpers.batch.records import BatchRecord, BatchRecords

from delivery.magazines.aerospike import AerospikeStore
from delivery.magazines.aerospike_records import RecordKeys
from delivery.magazines.kv_store import AmbiguousResultError, StoreRefusedError, WriteOutcome
from rooms.backend_urls import parse_aerospike_url
from rooms.domain.magazine import Slot
from tests.faults.hostile.suite import Suite
from tests.support.magazines import NAME

_CODES: Final = (
    0,
    0,
    0,
    0,
    2,
    5,
    13,
    27,
    1,
    9,
    11,
    14,
    18,
    -1,
    -8,
    -10,
    -15,
    -16,
    -2,
    4,
    8,
    20,
    22,
)
_KINDS: Final = ("create", "mark", "stamp", "read", "remove", "claim", "sweep_state")
_SPOKEN: Final = {
    2: WriteOutcome.MISSING,
    5: WriteOutcome.EXISTS,
    13: WriteOutcome.TOO_LARGE,
    27: WriteOutcome.FILTERED,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Describe the answer for one record. `gen` None: no record; -1: no metadata."""

    code: int
    gen: int | None
    bins: dict[str, int]

    @property
    def from_node(self) -> bool:
        return self.code == 0 and self.gen is not None and self.gen > 0


@dataclass(frozen=True, slots=True)
class Case:
    """One call of the adapter, and the client's answers to it."""

    kind: str
    answers: tuple[Answer, ...]
    batch: int
    raised: int | None
    """The code of the error that the client raises instead."""
    short: int
    """Records that are missing in the answer to a removal."""


class Client:
    """Answers as the case says."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def _fill(self, one: BatchRecord, answer: Answer) -> None:
        one.result = answer.code
        meta = None if answer.gen == -1 else {"gen": answer.gen, "ttl": 0}
        one.record = None if answer.gen is None else (one.key, meta, dict(answer.bins))

    def batch_write(self, batch: BatchRecords, policy: object = None) -> BatchRecords:
        del policy
        self._raise()
        batch.result = self._case.batch
        for one, answer in zip(batch.batch_records, self._case.answers, strict=False):
            self._fill(one, answer)
        return batch

    def batch_remove(self, keys: Sequence[Any]) -> BatchRecords:
        self._raise()
        batch = BatchRecords([BatchRecord(key) for key in keys[self._case.short :]])
        return self.batch_write(batch)

    def operate(self, key: Any, ops: object, policy: object = None) -> Any:
        del ops, policy
        self._raise()
        answer = self._case.answers[0]
        if answer.code:
            raise exception.AerospikeError(answer.code, "said")
        return key, {"gen": answer.gen, "ttl": 0}, {"loadPointer": 7}

    def _raise(self) -> None:
        if self._case.raised is not None:
            raise exception.AerospikeError(self._case.raised, "said")


def _generate(random: Random) -> Case:
    def answer() -> Answer:
        gen = random.choice((None, -1, 0, 0, 1, 1, 2, 65_535))
        return Answer(random.choice(_CODES), gen, {"fireTS": 5} if random.random() < 0.5 else {})

    return Case(
        kind=random.choice(_KINDS),
        answers=tuple(answer() for _ in range(random.randint(1, 6))),
        batch=random.choice(_CODES),
        raised=random.choice(_CODES[4:]) if random.random() < 0.1 else None,
        short=random.choice((0, 0, 0, 1, 6)),
    )


def _check_writes(case: Case, outcomes: Sequence[WriteOutcome]) -> None:
    assert len(outcomes) == len(case.answers)
    for answer, outcome in zip(case.answers, outcomes, strict=True):
        if case.raised is not None or (answer.code == 0 and not answer.from_node):
            assert outcome is WriteOutcome.AMBIGUOUS
        elif answer.from_node:
            assert outcome is WriteOutcome.DONE
        else:
            assert outcome is _SPOKEN.get(answer.code, WriteOutcome.AMBIGUOUS)


def _check_reads(case: Case, found: Sequence[Any]) -> None:
    assert case.raised is None
    assert len(found) == len(case.answers)
    for answer, bins in zip(case.answers, found, strict=True):
        assert answer.code == 2 if bins is None else answer.from_node and bins == answer.bins


def _call(store: AerospikeStore, case: Case) -> str:
    slots = [Slot(0, at) for at in range(len(case.answers))]
    match case.kind:
        case "create":
            _check_writes(
                case, store.create(NAME, slots, [{"id": "a"}] * len(slots), [None] * len(slots))
            )
        case "mark":
            _check_writes(
                case, store.mark_deleted(NAME, slots, ["a"] * len(slots), call="c", swept=False)
            )
        case "stamp":
            found = store.stamp(NAME, slots, now_ms=1, call="c", before_ms=None)
            _check_writes(case, [outcome for outcome, _ in found])
        case "read":
            _check_reads(case, store.read(NAME, slots, ("fireTS",)))
        case "remove":
            store._client.remove([("ns", "set", str(slot)) for slot in slots])
            assert case.raised is None
            assert not case.short
            assert all(answer.code in {0, *_SPOKEN} for answer in case.answers)
        case "claim":
            first = store.claim(NAME, 0, 1, {})
            assert case.answers[0].code == 2 if first is None else first == 6
        case _:
            _check_reads(
                Case("read", case.answers[:1], case.batch, case.raised, 0),
                [store.sweep_state(NAME)],
            )
    return case.kind


@asynccontextmanager
async def _target(database_url: str) -> AsyncIterator[Callable[[Case], Awaitable[str]]]:
    del database_url

    async def run(case: Case) -> str:
        store = AerospikeStore(
            parse_aerospike_url("aerospike://127.0.0.1:1/ns"),
            RecordKeys(namespace="ns", farm="f", client="c"),
        )
        store._client._open_client, store._client._checked = Client(case), True
        try:
            return _call(store, case)
        except (AmbiguousResultError, StoreRefusedError) as exc:
            return type(exc).__name__

    yield run


SUITE: Final = Suite(name="aerospike-answers", cases=3_000, generate=_generate, target=_target)
