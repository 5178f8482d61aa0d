"""Check sequence numbers as a consumer can: from the messages that it receives, and nothing else."""

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Numbered:
    """Describe one receipt of a message. `sequence` None: the message came without a number."""

    key: str
    sequence: int | None
    message: str
    replayed: bool = False


@dataclass
class SequenceChecker:
    """Find gaps and repetitions in what one subscription receives. Threads may share it.

    The numbers of a key begin with 1. A gap is found when a later number of its key arrives, and is
    closed when its own number arrives after all.
    """

    _receipts: list[Numbered] = field(default_factory=list)
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def receive(self, *receipts: Numbered) -> None:
        """Add receipts, in the order in which they came."""
        with self._changing:
            self._receipts.extend(receipts)

    def receipts(self) -> Sequence[Numbered]:
        """Return everything that was received, in that order."""
        with self._changing:
            return list(self._receipts)

    def last(self) -> Mapping[str, int]:
        """Return the greatest number of each key."""
        return {key: max(numbers) for key, numbers in self._numbers().items()}

    def gaps(self) -> Mapping[str, Sequence[int]]:
        """Return the missing numbers of each key that lacks one, in ascending order."""
        found = {
            key: sorted(set(range(1, max(numbers))) - numbers.keys())
            for key, numbers in self._numbers().items()
        }
        return {key: missing for key, missing in found.items() if missing}

    def repetitions(self) -> Mapping[tuple[str, int], int]:
        """Return how often each number of a key came again."""
        return {
            (key, number): count - 1
            for key, numbers in self._numbers().items()
            for number, count in numbers.items()
            if count > 1
        }

    def replayed(self) -> frozenset[tuple[str, int]]:
        """Return the numbers that came at least once by a replay."""
        return frozenset(
            (one.key, one.sequence)
            for one in self.receipts()
            if one.replayed and one.sequence is not None
        )

    def contradictions(self) -> Sequence[str]:
        """Return what retries and replays cannot explain.

        A message without a number or with two, and a number of two messages.
        """
        messages: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        places: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        found = []
        for one in self.receipts():
            if one.sequence is None:
                found.append(f"{one.message} of {one.key} has no number")
                continue
            messages[one.key, one.sequence].add(one.message)
            places[one.message].add((one.key, one.sequence))
        found += [
            f"{key} {number} is the number of {', '.join(sorted(names))}"
            for (key, number), names in messages.items()
            if len(names) > 1
        ]
        found += [
            f"{message} has the numbers {sorted(numbers)}"
            for message, numbers in places.items()
            if len(numbers) > 1
        ]
        return sorted(found)

    def _numbers(self) -> Mapping[str, Counter[int]]:
        """Return how often each number of each key came."""
        found: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for one in self.receipts():
            if one.sequence is not None:
                found[one.key][one.sequence] += 1
        return found
