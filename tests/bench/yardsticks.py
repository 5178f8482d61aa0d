"""Define the yardsticks: measured figures of peers, floors (three times the best peer) and aims (five times)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """`per_cpu_s`, `per_s` and `p99_ms` of the peers by name; floor and aim for the field `of`.

    `p99_aim`: another aim, for the p99 in ms.
    """

    of: str
    floor: float | None = None
    aim: float | None = None
    p99_aim: float | None = None
    per_s: Mapping[str, float] = field(default_factory=dict)
    per_cpu_s: Mapping[str, float] = field(default_factory=dict)
    latency: str = ""

    def best(self) -> tuple[str, float] | None:
        """The best peer in the field `of`."""
        known = self.per_cpu_s if self.of == "per_cpu_s" else self.per_s
        return max(known.items(), key=lambda item: item[1]) if known else None


YARDSTICKS: Final[Mapping[str, Yardstick]] = {
    "S1 deliveries": Yardstick(
        of="per_cpu_s",
        floor=3000,
        aim=5000,
        per_s={"Svix": 1160, "Svix in memory": 1237, "Outpost": 1601, "WebhookX": 1175},
        per_cpu_s={"Svix": 671, "Svix in memory": 761, "Outpost": 948, "WebhookX": 690},
    ),
    "S2 deliveries": Yardstick(
        of="per_cpu_s",
        floor=8000,
        aim=12000,
        per_s={"Svix": 4230, "Svix in memory": 4019, "Outpost": 2185, "WebhookX": 2559},
        per_cpu_s={"Svix": 2381, "Svix in memory": 2366, "Outpost": 1202, "WebhookX": 1488},
    ),
    "S3 publishes": Yardstick(
        of="per_s",
        floor=4000,
        aim=6000,
        per_s={"Svix": 1018, "Svix in memory": 1217, "Outpost": 1591, "WebhookX": 1323},
    ),
    "publish, 64 clients": Yardstick(of="per_s", per_s={"Svix, delivery off": 2350}),
    "stomp send": Yardstick(of="ratio", aim=1.5),
    "stomp receive": Yardstick(of="ratio", aim=4),
    "S5 alone": Yardstick(of="p99_ms", latency="Svix 2/6, Outpost 40/100"),
    "S5 beside 1 hanging": Yardstick(
        of="p99_ms", latency="Svix 16/114 (unlimited tasks 2/5), Outpost 40/100"
    ),
    "S5 beside 1 hanging, 200/s": Yardstick(
        of="p99_ms", latency="Svix 4,600/12,500, Outpost with 200 in flight 15,000"
    ),
    "idle, first webhook": Yardstick(of="p50_ms", aim=10),
    "steady, 40/s": Yardstick(of="p50_ms", aim=15, p99_aim=40),
    "steady, 40/s on Artemis": Yardstick(of="p50_ms", aim=15, p99_aim=40),
    "lateness": Yardstick(of="p99_ms", aim=50),
    "lateness, artemis": Yardstick(of="p99_ms", aim=50),
}
BARE_PER_CPU_S: Final = 80_000.0
"""Sends a CPU-second of the bare sender loop where the peers were measured (12.5 µs a send): floors and aims over it are
what they ask for on a machine of any speed.
"""
MEMORY_OF_PEERS: Final = (
    "Svix 66 (357 draining 20,000), Svix in memory 62, Outpost 175, WebhookX 81"
)
