"""The faults: each begins, lasts a while, and ends.

Drawn at random, so that a seed gives the same run of them.
"""

import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.chaos.stage import Stage
from tests.support.polling import until
from tests.support.small_disk import fill

_SLOW_MS: Final = (20, 200)
_STEP_S: Final = 45.0


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong.

    `end` is called in any case, and afterwards everything is as before.
    """

    kind: str
    what: str
    longest_s: float
    begin: Callable[[], None]
    end: Callable[[], None]


def _nothing() -> None:
    return


def _end_process(stage: Stage, kind: str, name: str, number: signal.Signals) -> Fault:
    ended: list[int] = []

    def begin() -> None:
        ended.append(stage.service.kill(name, number))

    def end() -> None:
        stage.service.await_another(name, ended[-1])

    return Fault(kind, name, 0.0, begin, end)


def _freeze_process(stage: Stage, name: str) -> Fault:
    frozen: list[int] = []

    def begin() -> None:
        frozen.append(until(lambda: stage.service.pid(name), f"{name} to run"))
        os.kill(frozen[-1], signal.SIGSTOP)

    return Fault("freeze", name, 8.0, begin, lambda: os.kill(frozen[-1], signal.SIGCONT))


def _fill(stage: Stage) -> Fault:
    assert isinstance(stage.disk, Path)
    disk, filling = stage.disk, list[Path]()
    return Fault(
        "full disk",
        "postgres",
        3.0,
        lambda: filling.append(fill(disk)),
        lambda: filling.pop().unlink(),
    )


def _slow(stage: Stage, dice: random.Random) -> Fault:
    assert not isinstance(stage.slow_sync, str)
    slow, delay_ms = stage.slow_sync, dice.randint(*_SLOW_MS)
    return Fault(
        "slow disk",
        f"postgres by {delay_ms} ms",
        8.0,
        lambda: slow.set(delay_ms),
        lambda: slow.set(0),
    )


def _step(stage: Stage, name: str, dice: random.Random) -> Fault:
    clock = stage.clocks[name]
    assert not isinstance(clock, str)
    offset_s = dice.uniform(-_STEP_S, _STEP_S)
    return Fault(
        "clock",
        f"{name} by {offset_s:+.0f} s",
        6.0,
        lambda: clock.set(offset_s),
        lambda: clock.set(0),
    )


def draw(stage: Stage, kinds: Sequence[str], dice: random.Random) -> Fault:
    """A fault of one of the kinds that there are here."""
    possible = [kind for kind in kinds if kind in kinds_of(stage)]
    server = dice.choice(list(stage.servers))
    link = stage.links[dice.choice(list(stage.links))]
    process = dice.choice(stage.processes)
    match dice.choice(possible):
        case "kill" if dice.random() < len(stage.processes) / (
            len(stage.processes) + len(stage.servers)
        ):
            return _end_process(stage, "kill", process, signal.SIGKILL)
        case "kill":
            return Fault(
                "kill", server, 3.0, stage.servers[server].kill, stage.servers[server].start
            )
        case "stop":
            return _end_process(stage, "stop", process, signal.SIGTERM)
        case "freeze" if dice.random() < 0.5:
            return _freeze_process(stage, process)
        case "freeze":
            return Fault(
                "freeze", server, 8.0, stage.servers[server].suspend, stage.servers[server].resume
            )
        case "cut":
            return Fault("cut", link.name, 0.0, link.cut, _nothing)
        case "silence":
            return Fault("silence", link.name, 8.0, link.hold, link.release)
        case "full disk":
            return _fill(stage)
        case "slow disk":
            return _slow(stage, dice)
        case _:
            return _step(stage, dice.choice(list(stage.clocks)), dice)


KINDS: Final = ("kill", "stop", "freeze", "cut", "silence", "full disk", "slow disk", "clock")


def kinds_of(stage: Stage) -> Sequence[str]:
    """Those that can be made here."""
    missing = {
        "full disk": isinstance(stage.disk, str),
        "slow disk": isinstance(stage.slow_sync, str),
        "clock": any(isinstance(clock, str) for clock in stage.clocks.values()),
    }
    return [kind for kind in KINDS if not missing.get(kind, False)]
