"""One run: load, faults one after the other, sometimes two at a time, and the accounting."""

import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.chaos.accounting import Account, account
from tests.chaos.faults import Fault, draw, kinds_of
from tests.chaos.stage import Stage, staged
from tests.support import stall_guard
from tests.support.load import Load, Uneven, loading
from tests.support.polling import until
from tests.support.room import Place
from tests.support.webhook_sink import sinking

_PUBLISHERS: Final = 4
_PACE_S: Final = 0.03
_ANSWER_S: Final = 0.03
_LONGEST_PAUSE_S: Final = 1.0
_TWO_AT_A_TIME: Final = 0.2
_COMPLETE_S: Final = 600.0
_RECOVERY_S: Final = 180.0

_UNFINISHED: Final = """
SELECT state::text, count(*) FROM deliveries WHERE room_id = %s AND state IN ('scheduled', 'queued', 'held', 'leased')
GROUP BY state
"""


def run(
    folder: Path, *, shape: str, kinds: Sequence[str], seconds: float, most: int | None, seed: int
) -> Account:
    """Run until the time is over or `most` faults were made, print what happens, and return the account."""
    dice = random.Random(seed)
    with sinking() as sink, staged(folder, shape) as stage:
        say(f"{shape}, seed {seed}: {', '.join(kind for kind in kinds if kind in kinds_of(stage))}")
        for why in stage.unavailable:
            say(f"  left out: {why}")
        place = Place.open(
            stage.service,
            sink,
            delivery_delay_ms=50,
            delivery_delay_multiplier=1.5,
            delivery_attempts=30,
            delivery_max_delay_ms=1000,
        )
        behaviours = {
            place.push(name): Uneven(seed, share, after_s=_ANSWER_S)
            for name, share in _WEBHOOKS.items()
        }
        for hook, behaviour in behaviours.items():
            sink.behave(hook.path, behaviour)
        queue = place.queue()
        with loading(place, queue, publishers=_PUBLISHERS, pace_s=_PACE_S) as load:
            made, recoveries = _inflict(stage, load, kinds, dice, seconds=seconds, most=most)
            stage.service.await_ready()
            began = time.monotonic()
            load.end_publishing()
            _await_completion(stage, place)
            until(
                lambda: set(load.accepted.values()) <= load.received,
                "the puller to have everything",
            )
            complete_s = time.monotonic() - began
        stood_still = stall_guard.logged(*stage.service.logs())
        result = account(
            load,
            sink,
            {hook: one.succeeded for hook, one in behaviours.items()},
            queue,
            stood_still,
        )
    say(
        f"{shape}: {made.total()} faults: {', '.join(f'{kind} {times}' for kind, times in made.most_common())}"
    )
    say(
        f"  publishing again after a fault: median {statistics.median(recoveries):.2f} s, longest {max(recoveries):.2f} s"
    )
    say(f"  complete {complete_s:.2f} s after readiness")
    say(
        f"  accepted {result.accepted:,}, repeated {result.repeated:,}, lost {sum(map(len, result.lost.values()))}"
    )
    say(
        f"  calls {result.calls:,}, doubled {result.doubled:,}, after a success {result.after_success:,}"
    )
    say(f"  event loops that stood still: {len(stood_still)}")
    for line in stood_still[:10]:
        say(f"    {line}")
    for answer in Counter(result.unexpected).most_common(10):
        say(f"  unexpected: {answer}")
    for where, messages in result.lost.items():
        if messages:
            say(f"  LOST at {where}: {', '.join(messages[:10])}")
    return result


_WEBHOOKS: Final = {"steady": 0.0, "uneven": 0.1}


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _inflict(
    stage: Stage,
    load: Load,
    kinds: Sequence[str],
    dice: random.Random,
    *,
    seconds: float,
    most: int | None,
) -> tuple[Counter[str], list[float]]:
    """Make faults; how many of each kind, and how long publishing took to go on after each, in seconds."""
    made: Counter[str] = Counter()
    recoveries: list[float] = []
    pause = threading.Event()
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s and (most is None or made.total() < most):
        pause.wait(dice.uniform(0, _LONGEST_PAUSE_S))
        faults = [draw(stage, kinds, dice)]
        if dice.random() < _TWO_AT_A_TIME:
            other = draw(stage, kinds, dice)
            # A frozen server that is killed, too, is one fault with a clumsy end.
            if other.what != faults[0].what:
                faults.append(other)
        lasting = [dice.uniform(0, fault.longest_s) for fault in faults]
        _last(faults, max(lasting), pause)
        made.update(fault.kind for fault in faults)
        began = time.monotonic()
        before = len(load.accepted)
        until(
            lambda before=before: len(load.accepted) > before + _PUBLISHERS,  # type: ignore[misc]
            f"publishes to be accepted after {faults}",
            within_s=_RECOVERY_S,
        )
        recoveries.append(time.monotonic() - began)
        named = " and ".join(f"{fault.kind} {fault.what}" for fault in faults)
        say(
            f"  {made.total():5} {named} for {max(lasting):.1f} s: accepting after {recoveries[-1]:.2f} s, {before:,} so far"
        )
    return made, recoveries


def _last(faults: Sequence[Fault], seconds: float, pause: threading.Event) -> None:
    begun: list[Fault] = []
    try:
        for fault in faults:
            begun.append(fault)
            fault.begin()
        pause.wait(seconds)
    finally:
        for fault in reversed(begun):
            fault.end()


def _await_completion(stage: Stage, place: Place) -> None:
    def unfinished() -> list[tuple[object, ...]]:
        import psycopg

        with psycopg.connect(stage.database_url) as connection:
            return list(connection.execute(_UNFINISHED, [place.id]))

    until(
        lambda: not unfinished(),
        lambda: f"every delivery to end; {unfinished()}",
        within_s=_COMPLETE_S,
        pause_s=0.2,
    )
