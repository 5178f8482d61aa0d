"""Simulate endpoints that fail in known ways, and compare retry advice with the truth.

A world is one subscription: how often messages come, when its endpoint is available, which share
of the bodies it refuses at any time, and the policy that is set. The truth of a policy is its
expected effect over the same messages and the true availability, or over those of a later period
of the same world.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from delivery.analytics.findings.policy_choice import RetryAdvice, advise
from delivery.analytics.findings.policy_simulation import Arrivals, Policy
from delivery.analytics.findings.series import BIN_S, Floats, Ints
from delivery.analytics.findings.success_rates import AttemptSuccessRates

HOUR_S: Final = 3600
_START_BIN: Final = 117_000_000
_LATENCY_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Outages:
    """Outages at random times: so many a day, of this mean length, with this success rate."""

    a_day: float
    mean_s: float
    rate: float = 0.0
    nightly: bool = False
    """At two at night, each night with probability `a_day`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryWorld:
    """Parameters of a world. `a_minute`: messages. `refused`: share of bodies that always fail."""

    name: str
    policy: Policy
    days: float = 3.0
    a_minute: float = 2.0
    noise: float = 0.01
    outages: tuple[Outages, ...] = ()
    refused: float = 0.0
    refused_from: float = 0.0
    """Part of the period after which bodies are refused."""
    longer: float = 1.0
    """Factor of the length of outages in the last third."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """A period of a world: its messages, refused ones, and the endpoint's success rate by second."""

    born_s: Floats
    refused: "np.typing.NDArray[np.bool_]"
    rate: Floats

    def success(self, at_s: Floats) -> Floats:
        """Return the success rate at these seconds."""
        found: Floats = self.rate[np.minimum(at_s.astype(np.int64), len(self.rate) - 1)]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueEffect:
    """The expected effect of a policy: share delivered, attempts a delivery, mean wait."""

    delivered: float
    attempts: float
    mean_wait_s: float


def draw_period(world: RetryWorld, random: np.random.Generator) -> Period:
    """Draw the availability and the messages of a period."""
    span = int(world.days * 24 * HOUR_S)
    rate = np.full(span + 48 * HOUR_S, 1 - world.noise)
    days = len(rate) / 86_400
    for kind in world.outages:
        if kind.nightly:
            nights = np.flatnonzero(random.random(int(days)) < kind.a_day)
            begins = nights * 86_400 + 2 * HOUR_S + random.uniform(0, 1800, len(nights))
        else:
            begins = random.uniform(0, len(rate), random.poisson(kind.a_day * days))
        for begin in begins.tolist():
            late = world.longer if begin > span * 0.67 else 1.0
            length = random.gamma(4.0, kind.mean_s * late / 4.0)
            some = slice(int(begin), int(begin + length))
            rate[some] = np.minimum(rate[some], kind.rate)
    born = np.sort(random.uniform(0, span, random.poisson(world.a_minute * span / 60)))
    refused = (random.random(len(born)) < world.refused) & (born >= world.refused_from * span)
    return Period(born_s=born, refused=refused, rate=rate)


def true_effect(period: Period, policy: Policy, random: np.random.Generator) -> TrueEffect:
    """Return the expected effect of a policy over a period; its jitter is drawn."""
    left = np.where(period.refused, 0.0, 1.0)
    total = max(len(left), 1)
    at, first = period.born_s.copy(), period.born_s + _LATENCY_S
    tried = got = waited = 0.0
    waits = [0.0, *policy.waits_s().tolist()]
    cap = np.inf if policy.max_delay_ms is None else policy.max_delay_ms / 1000
    for wait in waits:
        spread = 1 + policy.jitter * random.uniform(-1, 1, len(at))
        at = at + np.minimum(wait * spread, max(cap, 0.0)) + _LATENCY_S
        tried += float(left.sum() + period.refused.sum())
        delivered = left * period.success(at)
        got += float(delivered.sum())
        waited += float((delivered * (at - first)).sum())
        left = left - delivered
    return TrueEffect(
        delivered=got / total, attempts=tried / total, mean_wait_s=waited / max(got, 1)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """The counts that the analysis has of a period under a policy."""

    arrivals: Arrivals
    rates: AttemptSuccessRates
    bins: Ints
    attempts: Ints
    successes: Ints

    def advice(self, key: int = 1) -> RetryAdvice | None:
        """Return the advice of these counts."""
        return advise(
            key,
            self.arrivals,
            self.rates,
            bins=self.bins,
            attempts=self.attempts,
            successes=self.successes,
        )


def log_period(
    period: Period, policy: Policy, random: np.random.Generator, *, end_s: float
) -> Logged:
    """Simulate every attempt before `end_s` under a policy, and count as the analysis does."""
    count = len(period.born_s)
    at = period.born_s + _LATENCY_S
    first_bin = _bin(at)
    tries, delivered, over = np.zeros((3, count), dtype=np.int64)
    left = np.arange(count)
    sums: dict[str, list[int]] = {
        name: [] for name in ("attempts", "successes", "retries", "delay_ms", "latency_us")
    }
    made: list[Ints] = []
    well: list[Ints] = []
    waits = policy.waits_s()
    for number in range(policy.attempts + 1):
        left = left[at[left] < end_s]
        if not len(left):
            break
        success = (random.random(len(left)) < period.success(at[left])) & ~period.refused[left]
        tries[left] += 1
        made.append(_bin(at[left]))
        well.append(_bin(at[left[success]]))
        delivered[left[success]] = 1
        over[left[success]] = 1
        failed = left[~success]
        sums["attempts"].append(len(left))
        sums["successes"].append(int(success.sum()))
        sums["latency_us"].append(round(len(left) * _LATENCY_S * 1e6))
        again = number < policy.attempts
        delays = np.zeros(len(failed))
        if again:
            spread = 1 + policy.jitter * random.uniform(-1, 1, len(failed))
            cap = np.inf if policy.max_delay_ms is None else policy.max_delay_ms / 1000
            delays = np.minimum(waits[number] * spread, cap)
            at[failed] += delays + _LATENCY_S
        else:
            over[failed] = 1
        sums["retries"].append(len(failed) if again else 0)
        sums["delay_ms"].append(round(float(delays.sum()) * 1000))
        left = failed
    ended = over == 1
    groups, numbers = np.unique(
        np.stack((first_bin[ended], tries[ended], delivered[ended])), axis=1, return_counts=True
    )
    bins, attempts = np.unique(np.concatenate(made), return_counts=True)
    successes = np.zeros(len(bins), dtype=np.int64)
    found, counts = np.unique(np.concatenate(well), return_counts=True)
    successes[np.searchsorted(bins, found)] = counts
    return Logged(
        arrivals=Arrivals(bins=groups[0], tries=groups[1], delivered=groups[2], count=numbers),
        rates=AttemptSuccessRates(
            **{name: np.array(values, dtype=np.int64) for name, values in sums.items()},
            jitter=policy.jitter,
        ),
        bins=bins,
        attempts=attempts,
        successes=successes,
    )


def _bin(at_s: Floats) -> Ints:
    found: Ints = _START_BIN + np.floor(at_s / BIN_S).astype(np.int64)
    return found


def _policy(delay_s: float, multiplier: float, attempts: int, **other: float) -> Policy:
    return Policy(delay_ms=delay_s * 1000, multiplier=multiplier, attempts=attempts, **other)


_USUAL: Final = _policy(30, 2, 4)
_SHORT: Final = _policy(1, 2, 3)
WORLDS: Final[tuple[RetryWorld, ...]] = (
    RetryWorld(name="noise", policy=_USUAL, noise=0.03),
    RetryWorld(name="much noise", policy=_SHORT, noise=0.3, a_minute=6),
    RetryWorld(name="outages", policy=_USUAL, outages=(Outages(a_day=4, mean_s=1500),)),
    RetryWorld(name="short retries", policy=_SHORT, outages=(Outages(a_day=6, mean_s=600),)),
    RetryWorld(
        name="partial outages", policy=_SHORT, outages=(Outages(a_day=4, mean_s=1800, rate=0.6),)
    ),
    RetryWorld(
        name="flapping", policy=_SHORT, a_minute=5, outages=(Outages(a_day=300, mean_s=45),)
    ),
    RetryWorld(
        name="low traffic", policy=_USUAL, a_minute=0.08, days=10,
        outages=(Outages(a_day=2, mean_s=2400),),
    ),
    RetryWorld(name="low traffic, noise", policy=_USUAL, a_minute=0.05, days=7, noise=0.04),
    RetryWorld(
        name="nightly", policy=_policy(60, 2, 5), a_minute=1,
        days=7, outages=(Outages(a_day=0.5, mean_s=2700, nightly=True),),
    ),
    RetryWorld(name="refused 0.3 %", policy=_USUAL, refused=0.003),
    RetryWorld(
        name="refused 5 %, outages", policy=_USUAL, refused=0.05,
        outages=(Outages(a_day=3, mean_s=1500),),
    ),
    RetryWorld(name="refused 40 %", policy=_SHORT, refused=0.4, noise=0.02),
    RetryWorld(
        name="refused 10 %, low traffic", policy=_USUAL, a_minute=0.1, days=7, refused=0.1,
        outages=(Outages(a_day=1, mean_s=1800),),
    ),
    RetryWorld(name="broken version", policy=_USUAL, refused=0.33, refused_from=0.6),
    RetryWorld(
        name="too many retries", policy=_policy(1, 1, 20), noise=0.02,
        outages=(Outages(a_day=3, mean_s=900),), refused=0.02,
    ),
    RetryWorld(
        name="cap and jitter", policy=_policy(5, 3, 8, max_delay_ms=60_000, jitter=0.2),
        outages=(Outages(a_day=3, mean_s=1200),),
    ),
    RetryWorld(name="no retries", policy=_policy(0, 1, 0), noise=0.05),
    RetryWorld(
        name="long retries", policy=_policy(300, 2, 8), a_minute=1, days=7,
        outages=(Outages(a_day=1, mean_s=7200),),
    ),
    RetryWorld(
        name="outages grow", policy=_USUAL, longer=5.0, outages=(Outages(a_day=5, mean_s=900),)
    ),
)  # fmt: skip
UNRESOLVED: Final = frozenset({"flapping"})
"""Worlds with outages as short as the bins of 15 s, and attempts that all fit into them.

A body that is refused and an endpoint that is away for these seconds look the same, so what is
promised there is too little.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceScore:
    """One piece of advice against the truth of its period and of a later one."""

    world: str
    advice: RetryAdvice
    deployed: TrueEffect
    recommended: TrueEffect | None
    deployed_later: TrueEffect
    recommended_later: TrueEffect | None

    @property
    def is_worse(self) -> bool:
        """Return True if the recommended policy delivers a tenth of a point less, or costs more.

        It costs more if it delivers no more, with more attempts and longer waits.
        """
        best, base = self.recommended, self.deployed
        if best is None:
            return False
        gain = best.delivered - base.delivered
        dearer = best.attempts > base.attempts * 1.02 and best.mean_wait_s > base.mean_wait_s * 1.02
        return gain < -0.001 or (gain < 0.0005 and dearer)

    @property
    def is_worse_later(self) -> bool:
        """Return True if it delivers a tenth of a point less in a later period."""
        best = self.recommended_later
        return best is not None and best.delivered < self.deployed_later.delivered - 0.001

    def error(self) -> float:
        """Return promised minus true share delivered, in points."""
        if self.recommended is None or self.advice.recommended is None:
            return 0.0
        return (self.advice.recommended.effect.delivered - self.recommended.delivered) * 100

    def holds(self, truth: TrueEffect | None, name: str) -> bool:
        """Return True if the interval of an effect contains its truth."""
        found = self.advice.expected_range
        if found is None or truth is None:
            return True
        low, high = getattr(found, name)
        slack = 1e-4 if name == "delivered" else 0.01
        return bool(low - slack <= getattr(truth, name) <= high + slack)

    @property
    def is_right(self) -> bool:
        """Return True if the promised share is right within a point, or by its interval."""
        return abs(self.error()) <= 1.0 or self.holds(self.recommended, "delivered")


def score(world: RetryWorld, seed: int) -> AdviceScore | None:
    """Simulate a world, ask for advice and compare; None if there is too little for advice."""
    random = np.random.default_rng([seed, *world.name.encode()])
    period = draw_period(world, random)
    logged = log_period(period, world.policy, random, end_s=world.days * 24 * HOUR_S)
    advice = logged.advice(key=seed + 1)
    if advice is None:
        return None
    later = draw_period(world, random)
    best = None if advice.recommended is None else advice.recommended.policy
    return AdviceScore(
        world=world.name,
        advice=advice,
        deployed=true_effect(period, world.policy, random),
        recommended=None if best is None else true_effect(period, best, random),
        deployed_later=true_effect(later, world.policy, random),
        recommended_later=None if best is None else true_effect(later, best, random),
    )
