"""Simulate worlds of deliveries whose failures have known causes, and return the truth beside them.

Everything is drawn from one seed. The truth is returned and never written, so that no job can read
it. A world is a log of attempts as columns: scoring needs neither Spark nor files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tests.support.sealed_segments import START_S, Floats, Ints

ERRORS: Final = ("status", "timeout", "connect", "dns", "tls")
_STATUSES: Final = (503, 500, 502, 404)
_NO_FAULT: Final = -1
_LATENCY: Final = (3.5, 0.5)
"""Mean and deviation of the logarithm of an attempt's milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """From `begin_s` to `end_s`, `share` of the attempts fail that have these attribute values.

    `flap_s`: seconds of failing and of working in turn. `cause`: attribute and value to be named.
    """

    begin_s: float
    end_s: float
    where: Mapping[str, tuple[int, ...]]
    """Codes by column of the attempts: subscription, host, event_type, event_version, machine."""
    cause: tuple[str, str]
    share: float = 1.0
    flap_s: tuple[float, float] | None = None
    error: int = 0

    def is_on(self, t: Floats) -> npt.NDArray[np.bool_]:
        """Return True for the times at which it fails attempts."""
        on = (t >= self.begin_s) & (t < self.end_s)
        if self.flap_s is not None:
            working, failing = self.flap_s[1], self.flap_s[0]
            on &= (t - self.begin_s) % (failing + working) < failing
        return on


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of a world. Every subscription gets all messages of its room."""

    seed: int
    minutes: int
    rooms: Sequence[int]
    """Room of each subscription, 0 to n - 1 without gaps."""
    hosts: Sequence[str]
    """Host of each subscription's webhook: a name or an IP address."""
    a_minute: Sequence[float]
    """Messages a minute, by room."""
    types: int = 3
    versions: int = 2
    machines: int = 3
    processes: int = 2
    """Worker processes of each machine."""
    faults: Sequence[Fault] = ()
    noise: float | Sequence[float] = 0.01
    """Share of attempts that fail by chance, of all subscriptions or by subscription."""
    hopeless: float = 0.002
    """Share of deliveries that no attempt delivers."""
    waits_s: Sequence[float] = (30.0, 60.0, 120.0, 240.0)
    skew_s: float = 2.0
    """Greatest error of a machine's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueIncident:
    """A fault as the log shows it: the subscriptions with failures of it."""

    begin_s: float
    end_s: float
    subscriptions: frozenset[int]
    cause: tuple[str, str]
    share: float
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Attempts by column, and the truth. Times are seconds since the start of the log."""

    plan: Plan
    attempts: Mapping[str, Ints]
    """subscription, room, host, event_type, event_version, machine, worker, error, status, attempt,
    delivery, us (of the skewed clock, since 1970); error and status are -1 where there is none."""
    gave_up: npt.NDArray[np.bool_]
    """True for the last failed attempt of a delivery that was then sidelined."""
    truth: Sequence[TrueIncident]
    host_names: Sequence[str]

    def cells(self, bin_s: int) -> pa.Table:
        """Return the counts that the driver gets from Spark: of attempts alike in a time bin."""
        tried = self.attempts
        last = np.flatnonzero(self.gave_up)
        rows = np.concatenate((np.arange(len(tried["us"])), last))
        tried = {name: values[rows] for name, values in tried.items()}
        sidelined = np.arange(len(rows)) >= len(rows) - len(last)
        failed = (tried["error"] >= 0) & ~sidelined
        arrays = {
            "sub_key": pa.array(tried["subscription"]),
            "bin": pa.array(tried["us"] // (bin_s * 1_000_000)),
            "first": pa.array((tried["attempt"] == 0) & ~sidelined),
            "room_id": pa.array(tried["room"] + 1000).cast(pa.string()),
            "event_version": pa.array(tried["event_version"] + 1).cast(pa.string()),
            "worker": pa.array(tried["worker"] + 1).cast(pa.string()),
            "target_host": pa.array(self.host_names).take(pa.array(tried["host"])),
            "event_type": pa.array(type_names(self.plan.types)).take(pa.array(tried["event_type"])),
            "worker_host": pa.array(
                [f"machine-{number}" for number in range(self.plan.machines)]
            ).take(pa.array(tried["machine"])),
            "error_class": pa.array(ERRORS).take(pa.array(tried["error"], mask=~failed)),
            "http_status": pa.array(tried["status"], mask=~failed | (tried["status"] < 0)).cast(
                pa.string()
            ),
            "policy_version": pa.array(np.ones(len(rows), dtype=np.int64)),
        }
        keys = list(arrays)
        arrays |= {
            "attempts": pa.array((~sidelined).astype(np.int64)),
            "sidelined": pa.array(sidelined.astype(np.int64)),
        }
        counted = (
            pa.table(arrays).group_by(keys).aggregate([("attempts", "sum"), ("sidelined", "sum")])
        )
        return counted.rename_columns([*keys, "attempts", "sidelined"])


def joined(worlds: Sequence[World], *, hours: int) -> World:
    """Return the first hours of each world as one, one after another, without the truth.

    Subscriptions, rooms and deliveries are those of their world only; hosts, machines, workers and
    event types are known to all.
    """
    names = sorted({name for world in worlds for name in world.host_names})
    length_us = hours * 3_600_000_000
    parts: list[dict[str, Ints]] = []
    gave_up: list[npt.NDArray[np.bool_]] = []
    rooms: list[int] = []
    deliveries = 0
    for number, world in enumerate(worlds):
        tried = world.attempts
        early = tried["us"] < START_S * 1_000_000 + length_us
        part = {name: values[early] for name, values in tried.items()}
        places = np.array([names.index(name) for name in world.host_names])
        first_room = max(rooms, default=-1) + 1
        part["host"] = places[part["host"]]
        part["subscription"] = part["subscription"] + len(rooms)
        part["room"] = part["room"] + first_room
        part["delivery"] = part["delivery"] + deliveries
        part["us"] = part["us"] + number * length_us
        deliveries = int(part["delivery"].max()) + 1
        rooms += [first_room + room for room in world.plan.rooms]
        parts.append(part)
        gave_up.append(world.gave_up[early])
    largest = max((world.plan for world in worlds), key=lambda plan: plan.machines)
    return World(
        plan=replace(largest, rooms=rooms),
        attempts={name: np.concatenate([part[name] for part in parts]) for name in parts[0]},
        gave_up=np.concatenate(gave_up),
        truth=(),
        host_names=names,
    )


def type_names(count: int) -> list[str]:
    """Return the names of event types."""
    return [f"type-{number}.made" for number in range(count)]


def simulate(plan: Plan) -> World:
    """Simulate a world."""
    rng = np.random.default_rng(plan.seed)
    of_room = [np.flatnonzero(np.asarray(plan.rooms) == room) for room in range(len(plan.a_minute))]
    names = sorted(set(plan.hosts))
    host = np.array([names.index(one) for one in plan.hosts])
    counts = rng.poisson(np.asarray(plan.a_minute) * plan.minutes)
    room = np.repeat(np.arange(len(counts)), counts)
    born = rng.uniform(0, plan.minutes * 60, len(room))
    kind = rng.integers(0, plan.types, len(room))
    version = rng.integers(0, plan.versions, len(room))
    message = np.repeat(np.arange(len(room)), [len(of_room[one]) for one in room])
    parts = [of_room[one] for one in room]
    subscription = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    noise = np.broadcast_to(np.asarray(plan.noise, dtype=np.float64), (len(plan.rooms),))
    skew = rng.uniform(-plan.skew_s, plan.skew_s, plan.machines)
    hopeless = rng.random(len(message)) < plan.hopeless
    left, due = np.arange(len(message)), born[message]
    rounds: list[dict[str, npt.NDArray[np.int64]]] = []
    by_fault: list[Ints] = []
    for attempt in range(len(plan.waits_s) + 1):
        sub = subscription[left]
        t = due[left] + 0.02 + rng.lognormal(*_LATENCY, len(left)) / 1000
        machine = rng.integers(0, plan.machines, len(left))
        columns = {
            "subscription": sub,
            "host": host[sub],
            "event_type": kind[message[left]],
            "event_version": version[message[left]],
            "machine": machine,
        }
        error, fault = _failures(plan, rng, columns, t, noise[sub], hopeless[left])
        status = np.where(
            error == 0, np.where(fault >= 0, 503, rng.choice(_STATUSES, len(left))), -1
        )
        status[error == _NO_FAULT] = 200
        kept = t < plan.minutes * 60
        row = {
            **columns,
            "room": np.asarray(plan.rooms)[sub],
            "worker": machine * plan.processes + rng.integers(0, plan.processes, len(left)),
            "error": error,
            "status": np.where(error == _NO_FAULT, -1, status),
            "attempt": np.full(len(left), attempt),
            "delivery": left,
            "us": START_S * 1_000_000 + np.rint((t + skew[machine]) * 1e6).astype(np.int64),
        }
        rounds.append({name: values[kept] for name, values in row.items()})
        by_fault.append(fault[kept])
        failed = (error >= 0) & kept
        ended, left = t[failed], left[failed]
        due = due.copy()
        wait = plan.waits_s[attempt] if attempt < len(plan.waits_s) else 0.0
        due[left] = ended + wait
    attempts = {name: np.concatenate([one[name] for one in rounds]) for name in rounds[0]}
    last = attempts["attempt"] == len(plan.waits_s)
    return World(
        plan=plan,
        attempts=attempts,
        gave_up=last & (attempts["error"] >= 0),
        truth=_truth(plan, attempts, np.concatenate(by_fault)),
        host_names=names,
    )


def _failures(  # noqa: PLR0917 - all of them by place
    plan: Plan,
    rng: np.random.Generator,
    columns: Mapping[str, Ints],
    t: Floats,
    noise: Floats,
    hopeless: npt.NDArray[np.bool_],
) -> tuple[Ints, Ints]:
    """Return error and fault of each attempt; -1: none."""
    count = len(t)
    error = np.full(count, _NO_FAULT)
    fault = np.full(count, _NO_FAULT)
    chance = rng.random(count) < noise
    error[chance] = rng.choice(3, int(chance.sum()), p=(0.6, 0.3, 0.1))
    error[hopeless] = 0
    for number, one in enumerate(plan.faults):
        hit = one.is_on(t) & (rng.random(count) < one.share)
        for name, codes in one.where.items():
            hit &= np.isin(columns[name], codes)
        error[hit], fault[hit] = one.error, number
    return error, fault


def _truth(plan: Plan, attempts: Mapping[str, Ints], fault: Ints) -> list[TrueIncident]:
    found = []
    for number, one in enumerate(plan.faults):
        of = fault == number
        first = of & (attempts["attempt"] == 0)
        # Of less than three deliveries nothing can be known.
        if first.sum() < _MIN_FIRST_FAILURES:
            continue
        found.append(
            TrueIncident(
                begin_s=one.begin_s,
                end_s=min(one.end_s, plan.minutes * 60.0),
                subscriptions=frozenset(np.unique(attempts["subscription"][of]).tolist()),
                cause=one.cause,
                share=one.share,
                failures=int(of.sum()),
            )
        )
    return found


_MIN_FIRST_FAILURES: Final = 3
