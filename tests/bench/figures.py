"""Hold the figures of runs, compute medians and format them."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.bench.yardsticks import BARE_PER_CPU_S, MEMORY_OF_PEERS, YARDSTICKS, Yardstick

CPU: Final = "cpu_s "
MIB: Final = "mib "
MOMENTS: Final = ("start", "middle", "end", "peak")
_COLUMNS: Final = (
    ("api",),
    ("worker",),
    ("postgres",),
    ("relay",),
    ("artemis",),
    ("upkeep", "supervisor"),
)
_MICRO: Final = 1e6


@dataclass(slots=True)
class Run:
    """Hold one run of one line of the tables.

    `values` by field; `verified`: checks that held; `faults`: those that did not.

    Fields: per_s, per_cpu_s, each (how many were done), `cpu_s <part>`, cpu_s, bare_per_cpu_s,
    ratio, p50_ms, p99_ms, max_ms, others_cores (used by processes outside the run), `mib
    <part> <moment>`.
    """

    values: dict[str, float] = field(default_factory=dict)
    verified: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def cost(self, cpu_s: Mapping[str, float], *, done: int) -> None:
        """Enter the CPU seconds by part for what was done."""
        total = sum(cpu_s.values())
        self.values |= {f"{CPU}{part}": used_s for part, used_s in cpu_s.items()}
        self.values |= {"cpu_s": total, "each": done, "per_cpu_s": done / total if total else 0.0}


Runs = Mapping[str, Sequence[Run]]
"""The runs of each line, by its name."""


def medians(runs: Sequence[Run]) -> dict[str, float]:
    """Field by field."""
    fields = dict.fromkeys(name for run in runs for name in run.values)
    return {
        name: statistics.median(run.values[name] for run in runs if name in run.values)
        for name in fields
    }


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return (
        f"{value:,.0f}"
        if abs(value) >= 100
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2f}"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]

    def reported(line: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return [
        reported(lines[0]),
        "-" * (sum(widths) + 2 * len(widths) - 2),
        *map(reported, lines[1:]),
    ]


def _verdict(value: float, floor: float | None, aim: float | None) -> str:
    if aim is not None and value >= aim:
        return "aim met"
    if floor is not None:
        return "floor met" if value >= floor else "BELOW FLOOR"
    return ""


def _of_bare(yard: Yardstick | None, found: Mapping[str, float]) -> str:
    """The verdict on a machine of this speed: floor and aim as ratios of the bare loop, as the measured figure is one."""
    if (
        yard is None
        or yard.of != "per_cpu_s"
        or yard.floor is None
        or yard.aim is None
        or "ratio" not in found
    ):
        return ""
    floor, aim = yard.floor / BARE_PER_CPU_S, yard.aim / BARE_PER_CPU_S
    return f"{floor:.3f} to {aim:.3f}: {_verdict(found['ratio'], floor, aim)}"


def _rates(lines: Mapping[str, dict[str, float]]) -> list[str]:
    rows = []
    for name, found in lines.items():
        yard = YARDSTICKS.get(name)
        best = yard.best() if yard else None
        measured = found[yard.of] if yard else 0.0
        rows.append(
            [
                name,
                _number(found["per_s"]),
                _number(found.get("per_cpu_s")),
                f"{found['ratio']:.3f}" if "ratio" in found else "",
                _number(yard.floor) if yard else "",
                _number(yard.aim) if yard else "",
                _verdict(measured, yard.floor, yard.aim) if yard else "",
                _of_bare(yard, found),
                f"{_number(best[1])} {best[0]}" if best else "",
                f"{measured / best[1]:.1f}x" if best else "",
                _number(found.get("cpu_s")),
                *(_micros(found, parts) for parts in _COLUMNS),
                _number(found.get("p50_ms")),
                _number(found.get("p99_ms")),
                _number(found.get("others_cores")),
            ]
        )
    head = [
        "",
        "a second",
        "a CPU-s",
        "of bare",
        "floor",
        "aim",
        "",
        "of bare",
        "best peer",
        "to it",
        "CPU-s",
    ]
    return _table(
        [
            *(*head, "api µs", "worker µs", "postgres µs", "relay µs", "artemis µs", "rest µs"),
            *("asked p50 ms", "p99 ms", "other cores"),
        ],
        rows,
    )


def _micros(found: Mapping[str, float], parts: Sequence[str]) -> str:
    """CPU-µs of these parts for each that was done."""
    if "each" not in found or f"{CPU}{parts[0]}" not in found:
        return ""
    return _number(sum(found[f"{CPU}{part}"] for part in parts) / found["each"] * _MICRO)


def _latency_aims(yard: Yardstick | None) -> dict[str, float]:
    """Return the highest value that each figure may have."""
    if yard is None:
        return {}
    aims = {
        yard.of: yard.aim,
        "p99_ms": yard.p99_aim or (yard.aim if yard.of == "p99_ms" else None),
    }
    return {field: aim for field, aim in aims.items() if aim is not None}


def _latencies(lines: Mapping[str, dict[str, float]]) -> list[str]:
    rows = []
    for name, found in lines.items():
        yard = YARDSTICKS.get(name)
        cells = [
            _number(found.get(field))
            for field in (
                "p50_ms",
                "p90_ms",
                "p99_ms",
                "to_alone",
                "to_control",
                "max_ms",
                "samples",
                "cores",
                "others_cores",
            )
        ]
        aims = _latency_aims(yard)
        texts = " ".join(f"{field.removesuffix('_ms')} {aim:g}" for field, aim in aims.items())
        missed = any(found[field] > aim for field, aim in aims.items())
        verdict = "" if not aims else "AIM MISSED" if missed else "aim met"
        rows.append([name, *cells, texts, verdict, yard.latency if yard else ""])
    head = [
        "publish → arrival",
        "p50 ms",
        "p90 ms",
        "p99 ms",
        "to alone",
        "to same load",
        "max ms",
        "samples",
        "cores used",
        "other cores",
        "aim",
    ]
    return _table([*head, "", "peers p50/p99 ms"], rows)


def _memories(lines: Mapping[str, dict[str, float]]) -> list[str]:
    rows = []
    for name, found in lines.items():
        for part in dict.fromkeys(key.split()[1] for key in found if key.startswith(MIB)):
            cells = (_number(found.get(f"{MIB}{part} {moment}")) for moment in MOMENTS)
            rows.append([f"{name}: {part}", *cells])
    return [*_table(["MiB", *MOMENTS], rows), f"Memory of the peers: {MEMORY_OF_PEERS}"]


def reported(runs: Runs) -> str:
    """Everything as text: rates, latencies, memory, and what was verified."""
    lines = {name: medians(found) for name, found in runs.items()}
    sections = (
        (_rates, {name: found for name, found in lines.items() if "per_s" in found}),
        (
            _latencies,
            {
                name: found
                for name, found in lines.items()
                if "per_s" not in found and "p50_ms" in found
            },
        ),
        (
            _memories,
            {
                name: found
                for name, found in lines.items()
                if any(field.startswith(MIB) for field in found)
            },
        ),
    )
    out: list[str] = []
    for tell, some in sections:
        if some:
            out += ["", *tell(some)]
    out += ["", "Verified:"]
    for name, found in runs.items():
        out += [
            f"  {name}: {text}"
            for text in dict.fromkeys(text for run in found for text in run.verified)
        ]
    wrong = faults(runs)
    out += [
        "",
        "Everything that was to be verified holds." if not wrong else "WRONG:",
        *(f"  {fault}" for fault in wrong),
    ]
    return "\n".join(out)


def faults(runs: Runs) -> list[str]:
    """Return the failed verdicts of all runs."""
    return [
        f"{name}: {fault}" for name, found in runs.items() for run in found for fault in run.faults
    ]


def write(path: Path, runs: Runs, about: Mapping[str, Any]) -> None:
    """Medians and every single run as JSON."""
    lines = {
        name: {
            "median": medians(found),
            "runs": [run.values for run in found],
            "verified": [run.verified for run in found],
            "faults": [fault for run in found for fault in run.faults],
        }
        for name, found in runs.items()
    }
    path.write_text(json.dumps({"about": dict(about), "lines": lines}, indent=2) + "\n")
