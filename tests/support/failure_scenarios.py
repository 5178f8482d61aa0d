"""Plan worlds with one kind of trouble each: eleven that differ as the logs of real services do."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from tests.support.failure_worlds import Fault, Plan, type_names

_DAY: Final = 24 * 60
Draw = np.random.Generator


def _spread(rng: Draw, count: int, minutes: int, *, apart: float) -> list[float]:
    """Return begins in seconds with at least `apart` minutes between them."""
    free = max(minutes - apart * (count + 1), 1.0)
    return [
        float((at + apart * (number + 1)) * 60 - rng.uniform(0, 60))
        for number, at in enumerate(sorted(rng.uniform(0, free, count)))
    ]


def _names(count: int) -> list[str]:
    return [f"host-{number}.example" for number in range(count)]


def _plan(
    seed: int,
    hosts: Sequence[str],
    *,
    minutes: int = _DAY,
    a_minute: tuple[float, float] = (0.4, 2.0),
) -> Plan:
    """Return a plan without faults: five rooms, and the subscriptions of a host spread over them."""
    rng = np.random.default_rng([seed, 1])
    return Plan(
        seed=seed,
        minutes=minutes,
        rooms=[number % 5 for number in rng.permutation(len(hosts))],
        hosts=hosts,
        a_minute=rng.uniform(*a_minute, 5).tolist(),
        noise=rng.uniform(0.005, 0.03, len(hosts)).tolist(),
    )


def _with(plan: Plan, faults: Sequence[Fault], **changed: object) -> Plan:
    from dataclasses import replace

    return replace(plan, faults=faults, **changed)  # type: ignore[arg-type]


def _at_hosts(
    hosts: Sequence[str],
    which: Sequence[str],
    cause: tuple[str, str],
    begin_s: float,
    length_s: float,
    **more: object,
) -> Fault:
    names = sorted(set(hosts))
    return Fault(
        begin_s=begin_s,
        end_s=begin_s + length_s,
        where={"host": tuple(names.index(one) for one in which)},
        cause=cause,
        **more,  # type: ignore[arg-type]
    )


def _length(rng: Draw, low: float = 6, high: float = 45) -> float:
    return float(rng.uniform(low, high) * 60)


def _host_fault(rng: Draw, hosts: Sequence[str], begin_s: float, **more: object) -> Fault:
    host = str(rng.choice(sorted(set(hosts))))
    more = {"error": int(rng.integers(0, 4)), **more}
    return _at_hosts(hosts, [host], ("target_host", host), begin_s, _length(rng), **more)


def noise(seed: int) -> Plan:
    """Plan a day in which everything fails now and then, and nothing is wrong."""
    rng = np.random.default_rng([seed, 2])
    plan = _plan(seed, _names(40))
    return _with(plan, (), noise=rng.uniform(0.0, 0.08, 40).tolist(), hopeless=0.01)


def _shared_hosts(rng: Draw, subscriptions: int, hosts: int) -> list[str]:
    return [f"host-{number}.example" for number in rng.integers(0, hosts, subscriptions)]


def hosts(seed: int) -> Plan:
    """Plan a day in which hosts fail, each with all of its subscriptions."""
    rng = np.random.default_rng([seed, 2])
    some = _shared_hosts(rng, 40, 16)
    plan = _plan(seed, some)
    faults = [_host_fault(rng, some, at) for at in _spread(rng, 14, _DAY - 60, apart=20)]
    return _with(plan, faults)


def _addresses(rng: Draw, networks: int, hosts: int) -> list[str]:
    return [
        f"10.{20 + network}.{network * 3 % 250}.{10 + host}"
        if network % 4
        else f"2001:db8:{network + 1:x}::{host + 1:x}"
        for network in range(networks)
        for host in range(hosts)
    ]


def _network_of(address: str) -> str:
    if ":" in address:
        return ":".join(address.split(":")[:3]) + "::/48"
    return ".".join(address.split(".")[:3]) + ".0/24"


def _network_fault(rng: Draw, some: Sequence[str], begin_s: float, **more: object) -> Fault:
    network = str(rng.choice(sorted({_network_of(one) for one in some})))
    inside = sorted({one for one in some if _network_of(one) == network})
    cause = ("network", network) if len(inside) > 1 else ("target_host", inside[0])
    return _at_hosts(some, inside, cause, begin_s, _length(rng), **{"error": 1, **more})


def networks(seed: int) -> Plan:
    """Plan a day in which blocks of addresses fail, and single hosts of blocks."""
    rng = np.random.default_rng([seed, 2])
    some = [str(one) for one in rng.choice(_addresses(rng, 8, 4), 48)]
    plan = _plan(seed, some)
    faults = [
        _network_fault(rng, some, at) if number % 2 else _host_fault(rng, some, at)
        for number, at in enumerate(_spread(rng, 12, _DAY - 60, apart=20))
    ]
    return _with(plan, faults)


def _version_fault(rng: Draw, begin_s: float, plan: Plan) -> Fault:
    """A new version of one event type that nothing accepts."""
    kind = int(rng.integers(0, plan.types))
    version = plan.versions - 1
    return Fault(
        begin_s=begin_s,
        end_s=begin_s + _length(rng, 10, 40),
        where={"event_type": (kind,), "event_version": (version,)},
        cause=("event_version", f"{type_names(plan.types)[kind]} {version + 1}"),
        error=0,
    )


def versions(seed: int) -> Plan:
    """Plan a day in which new event versions are refused by all subscriptions."""
    rng = np.random.default_rng([seed, 2])
    plan = _plan(seed, _names(30))
    begins = _spread(rng, 4, _DAY - 60, apart=60)
    return _with(plan, [_version_fault(rng, at, plan) for at in begins])


def _machine_fault(rng: Draw, begin_s: float, plan: Plan) -> Fault:
    machine = int(rng.integers(0, plan.machines))
    return Fault(
        begin_s=begin_s,
        end_s=begin_s + _length(rng, 6, 30),
        where={"machine": (machine,)},
        cause=("worker_host", f"machine-{machine}"),
        error=2,
    )


def machines(seed: int) -> Plan:
    """Plan a day in which a worker machine is cut off, now and then."""
    rng = np.random.default_rng([seed, 2])
    plan = _plan(seed, _names(30))
    begins = _spread(rng, 4, _DAY - 60, apart=60)
    return _with(plan, [_machine_fault(rng, at, plan) for at in begins])


def partial(seed: int) -> Plan:
    """Plan a day in which hosts fail 30 % of their attempts."""
    rng = np.random.default_rng([seed, 2])
    some = _shared_hosts(rng, 40, 12)
    faults = [_host_fault(rng, some, at, share=0.3) for at in _spread(rng, 12, _DAY - 60, apart=20)]
    return _with(_plan(seed, some), faults)


def flapping(seed: int) -> Plan:
    """Plan a day in which hosts fail and work in turn."""
    rng = np.random.default_rng([seed, 2])
    some = _shared_hosts(rng, 40, 12)
    faults = []
    for at in _spread(rng, 10, _DAY - 120, apart=40):
        on, off = rng.uniform(60, 240, 2)
        flap = _host_fault(rng, some, at, flap_s=(float(on), float(off)))
        faults.append(_lengthened(flap, _length(rng, 25, 60), float(on + off), float(on)))
    return _with(_plan(seed, some), faults)


def _lengthened(fault: Fault, length_s: float, period_s: float, on_s: float) -> Fault:
    """Let a flapping fault end with a failing phase."""
    from dataclasses import replace

    whole = int(length_s // period_s) * period_s
    return replace(fault, end_s=fault.begin_s + whole + on_s)


def cascades(seed: int) -> Plan:
    """Plan a day in which failures of hosts overlap: one begins while another goes on."""
    rng = np.random.default_rng([seed, 2])
    some = [str(one) for one in rng.choice(_addresses(rng, 6, 3), 40)]
    faults: list[Fault] = []
    for at in _spread(rng, 6, _DAY - 150, apart=70):
        chosen = rng.choice(sorted(set(some)), int(rng.integers(2, 4)), replace=False)
        begin = at
        for host in chosen:
            length = _length(rng, 15, 45)
            error = int(rng.integers(0, 4))
            cause = ("target_host", str(host))
            faults.append(_at_hosts(some, [str(host)], cause, begin, length, error=error))
            begin += float(rng.uniform(4, 15) * 60)
    return _with(_plan(seed, some), faults)


def quiet(seed: int) -> Plan:
    """Plan two days with a message in five to twenty minutes."""
    rng = np.random.default_rng([seed, 2])
    some = _shared_hosts(rng, 40, 12)
    plan = _plan(seed, some, minutes=2 * _DAY, a_minute=(0.05, 0.2))
    begins = _spread(rng, 10, 2 * _DAY - 180, apart=60)
    faults = []
    for at in begins:
        host = str(rng.choice(sorted(set(some))))
        cause = ("target_host", host)
        faults.append(_at_hosts(some, [host], cause, at, _length(rng, 30, 120)))
    return _with(plan, faults)


def nightly(seed: int) -> Plan:
    """Plan three days with endpoints that are down for a while each night, by habit of their own."""
    rng = np.random.default_rng([seed, 2])
    some = _names(40)
    plan = _plan(seed, some, minutes=3 * _DAY)
    faults = []
    for host in rng.choice(some, 10, replace=False):
        usual = rng.uniform(60, 240)
        for night in range(3):
            begin = (night * _DAY + usual + rng.uniform(-8, 8)) * 60
            cause = ("target_host", str(host))
            error = int(rng.integers(0, 3))
            length = _length(rng, 10, 30)
            faults.append(_at_hosts(some, [str(host)], cause, float(begin), length, error=error))
    return _with(plan, faults)


def mixture(seed: int) -> Plan:
    """Plan three days with everything."""
    rng = np.random.default_rng([seed, 2])
    some = [str(one) for one in rng.choice(_addresses(rng, 10, 3), 60)]
    plan = _plan(seed, some, minutes=3 * _DAY)
    # Two endpoints that nearly always fail.
    often = [0.8, 0.7, *np.asarray(plan.noise)[2:].tolist()]
    faults: list[Fault] = []
    for number, at in enumerate(_spread(rng, 30, 3 * _DAY - 120, apart=35)):
        match number % 6:
            case 0:
                faults.append(_network_fault(rng, some, at))
            case 1:
                faults.append(_host_fault(rng, some, at, share=0.3))
            case 2:
                faults.append(_version_fault(rng, at, plan))
            case 3:
                faults.append(_machine_fault(rng, at, plan))
            case 4:
                on, off = rng.uniform(60, 240, 2)
                flap = _host_fault(rng, some, at, flap_s=(float(on), float(off)))
                faults.append(_lengthened(flap, _length(rng, 25, 60), float(on + off), float(on)))
            case _:
                faults.append(_host_fault(rng, some, at))
    return _with(plan, faults, noise=often, hopeless=0.005)


def many(seed: int) -> Plan:
    """Plan three days of 2,000 subscriptions with little traffic, of which 50 hosts fail twice."""
    rng = np.random.default_rng([seed, 2])
    some = [f"host-{number // 4}.example" for number in range(2_000)]
    plan = _plan(seed, some, minutes=3 * _DAY, a_minute=(0.06, 0.12))
    faults = []
    for number in rng.choice(500, 50, replace=False):
        host = f"host-{number}.example"
        for day in rng.choice(3, 2, replace=False):
            at = float(day * _DAY + rng.uniform(60, _DAY - 120)) * 60
            length = _length(rng, 30, 90)
            faults.append(_at_hosts(some, [host], ("target_host", host), at, length))
    return _with(plan, faults)


SCENARIOS: Final[Mapping[str, Callable[[int], Plan]]] = {
    one.__name__: one
    for one in (
        noise, hosts, networks, versions, machines, partial, flapping, cascades, quiet, nightly, mixture,
    )
}  # fmt: skip
TUNING_SEEDS: Final = (1, 2, 3)
"""Seeds on which thresholds were chosen."""
HELD_OUT_SEEDS: Final = (7_001, 7_002, 7_003)
"""Seeds that are only measured."""
