"""History: deliveries over time by what became of them, and how long they took, from journeys of any number."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Batch = Mapping[str, npt.NDArray[Any]]
Batches = Callable[[tuple[str, ...]], Iterable[Batch]]
"""The batches of `journeys` with these columns."""

FIRST: Final = "at the first attempt"
RETRIED: Final = "after retries"
PULLED: Final = "pulled"
ASIDE: Final = "put aside"
ENDED: Final = "ended otherwise"
OPEN: Final = "not over yet"
LOST: Final = "lost"
FATES: Final = (FIRST, RETRIED, PULLED, ASIDE, ENDED, OPEN, LOST)
SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

_MOST_BINS: Final = 150
_STEPS_S: Final = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86_400)
_FATE_OF: Final = {
    "acked": PULLED,
    "handed_over": PULLED,
    "sidelined": ASIDE,
    "held": OPEN,
    "waiting": OPEN,
    "in_flight": OPEN,
    "lost": LOST,
}
_OCTAVE: Final = 16
"""Bins of a duration's doubling: a percentile is off by 2.2 % of its value at most."""
_OCTAVES: Final = 40
_COLUMNS: Final = ("message_hi", "outcome", "attempts", "finished_us")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The messages published in one step of time: deliveries by fate, seconds from publish to delivery by percentile."""

    at: datetime
    fates: Mapping[str, int]
    took_s: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The moments in their order, `step_s` seconds each."""

    step_s: int
    moments: tuple[Moment, ...]

    def total(self, *fates: str) -> int:
        """Deliveries of these fates; of all, where none is named."""
        return sum(moment.fates[fate] for moment in self.moments for fate in fates or FATES)

    def worst(self, share: str) -> Moment | None:
        """The moment of the longest deliveries; None without any."""
        known = [moment for moment in self.moments if share in moment.took_s]
        return max(known, key=lambda moment: moment.took_s[share], default=None)


def history_of(batches: Batches) -> History:
    """Counted in two passes: the log's span decides how long a step is."""
    born = [_born_s(batch) for batch in batches(("message_hi",))]
    ends = [(int(some.min()), int(some.max())) for some in born if len(some)]
    if not ends:
        return History(step_s=_STEPS_S[0], moments=())
    first, last = min(low for low, _ in ends), max(high for _, high in ends)
    step = next((step for step in _STEPS_S if (last - first) / step < _MOST_BINS), _coarsest(last - first))
    origin = first // step
    count = last // step - origin + 1
    fates = np.zeros((len(FATES), count), dtype=np.int64)
    took = np.zeros((count, _OCTAVE * _OCTAVES), dtype=np.int64)
    for batch in batches(_COLUMNS):
        _count(batch, origin, step, fates, took)
    moments = tuple(
        Moment(
            at=datetime.fromtimestamp((origin + place) * step, UTC),
            fates=dict(zip(FATES, fates[:, place].tolist(), strict=True)),
            took_s=dict(_percentiles(took[place])),
        )
        for place in range(count)
    )
    return History(step_s=step, moments=moments)


def _coarsest(span_s: int) -> int:
    days = math.ceil(span_s / _MOST_BINS / _STEPS_S[-1]) + 1
    return days * _STEPS_S[-1]


def _born_s(batch: Batch) -> npt.NDArray[np.int64]:
    """Seconds of publish: an id's first 48 bits are its millisecond."""
    return (batch["message_hi"].astype(np.int64) >> 16) // 1000


def _count(batch: Batch, origin: int, step: int, fates: npt.NDArray[np.int64], took: npt.NDArray[np.int64]) -> None:
    at = _born_s(batch) // step - origin
    outcome = batch["outcome"]
    delivered = outcome == "delivered"
    first = delivered & (batch["attempts"] <= 1)
    left = ~delivered
    masks = {FIRST: first, RETRIED: delivered & ~first}
    for name, fate in _FATE_OF.items():
        of_name = outcome == name
        masks[fate] = masks[fate] | of_name if fate in masks else of_name
        left &= ~of_name
    masks[ENDED] = left
    for fate, mask in masks.items():
        fates[FATES.index(fate)] += np.bincount(at[mask], minlength=fates.shape[1])
    there = delivered & ~np.isnan(batch["finished_us"])
    ms = np.maximum(batch["finished_us"][there] / 1e3 - (batch["message_hi"][there].astype(np.int64) >> 16), 1.0)
    bins = np.minimum((np.log2(ms) * _OCTAVE).astype(np.int64), took.shape[1] - 1)
    np.add.at(took, (at[there], bins), 1)


def _percentiles(counts: npt.NDArray[np.int64]) -> Iterator[tuple[str, float]]:
    total = int(counts.sum())
    if not total:
        return
    reached = np.cumsum(counts)
    for name, share in SHARES.items():
        place = int(np.searchsorted(reached, math.ceil(share * total)))
        yield name, 2 ** ((place + 0.5) / _OCTAVE) / 1e3
