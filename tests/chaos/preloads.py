"""Libraries that make a disk slow and a clock step, loaded into processes by LD_PRELOAD.

Each is optional.
"""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SOURCE: Final = Path(__file__).with_name("slow_sync.c")
_FAKETIME: Final = (
    *Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"),
    *Path("/usr/lib").glob("faketime/libfaketimeMT.so.1"),
)


@dataclass(frozen=True, slots=True)
class SlowSync:
    """Delays what PostgreSQL flushes."""

    library: Path
    control: Path

    def set(self, delay_ms: int) -> None:
        """Delay each flush by so much from now on."""
        self.control.write_text(str(delay_ms))

    @property
    def environment(self) -> Mapping[str, str]:
        return {"LD_PRELOAD": str(self.library), "SLOW_SYNC_FILE": str(self.control)}


@dataclass(frozen=True, slots=True)
class SteppedClock:
    """Moves the wall clock of the processes that have it; the monotonic one goes on."""

    library: Path
    control: Path

    def set(self, offset_s: float) -> None:
        """Be so far from the real time from now on."""
        self.control.write_text(f"{offset_s:+.3f}s\n")

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            "LD_PRELOAD": str(self.library),
            "FAKETIME_TIMESTAMP_FILE": str(self.control),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_CACHE_DURATION": "1",
        }


def slow_sync(folder: Path) -> SlowSync | str:
    """Compile the library; why there is none, where there is none."""
    compiler = shutil.which("cc")
    if compiler is None:
        return "a slow disk takes a C compiler: apt install gcc libc6-dev"
    library = folder / "slow_sync.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE), "-ldl"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        return f"a slow disk takes a C compiler that works: {done.stderr.strip()[:200]}"
    made = SlowSync(library, folder / "slow_sync.ms")
    made.set(0)
    return made


def stepped_clock(folder: Path, name: str) -> SteppedClock | str:
    """Find libfaketime; why there is none, where there is none."""
    if not _FAKETIME:
        return "a stepped clock takes libfaketime: apt install libfaketime"
    made = SteppedClock(_FAKETIME[0], folder / f"{name}.clock")
    made.set(0)
    return made


def environment_of(*preloads: SlowSync | SteppedClock | str) -> dict[str, str]:
    """The environment that loads those which there are."""
    found = [one.environment for one in preloads if not isinstance(one, str)]
    merged = {name: value for one in found for name, value in one.items()}
    if found:
        merged["LD_PRELOAD"] = ":".join(one["LD_PRELOAD"] for one in found)
    return merged
