"""Compare promises with arrivals from outside: publishers' 202s, webhook calls and the consumer's leases."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.support.load import Load
from tests.support.room import Hook
from tests.support.webhook_sink import Sink


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The result of a run."""

    accepted: int
    repeated: int
    """Publishes that had to be sent again."""
    lost: Mapping[str, Sequence[str]]
    """Messages that were answered 202 and did not arrive, by where they should have."""
    calls: int
    doubled: int
    """Calls beyond one for each delivery and attempt."""
    after_success: int
    """Calls to an endpoint that had answered 2xx for that delivery before."""
    unexpected: Sequence[str]
    """Answers that neither accept nor ask to come again."""
    stalls: Sequence[str]
    """Lines of the logs about event loops that stood still."""

    @property
    def holds(self) -> bool:
        return not (any(self.lost.values()) or self.unexpected or self.stalls)


def account(
    load: Load,
    sink: Sink,
    hooks: Mapping[Hook, Sequence[str]],
    queue: str,
    stalls: Sequence[str],
) -> Account:
    """Compare. `hooks`: for each webhook the deliveries that it answered with 2xx, in order."""
    accepted = set(load.accepted.values())
    lost = {queue: sorted(accepted - load.received)}
    calls = doubled = after_success = 0
    for hook, succeeded in hooks.items():
        arrivals = sink.arrivals(hook.path)
        done = set(succeeded)
        arrived = {
            arrival.headers["rooms-message-id"]
            for arrival in arrivals
            if arrival.webhook_id in done
        }
        lost[hook.path] = sorted(accepted - arrived)
        calls += len(arrivals)
        doubled += len(arrivals) - len(
            Counter((arrival.webhook_id, arrival.attempt) for arrival in arrivals)
        )
        after_success += len(succeeded) - len(done)
    return Account(
        accepted=len(accepted),
        repeated=load.repeated,
        lost=lost,
        calls=calls,
        doubled=doubled,
        after_success=after_success,
        unexpected=load.unexpected,
        stalls=stalls,
    )
