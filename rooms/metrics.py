"""What Prometheus is told. One `Metrics` a process; with PROMETHEUS_MULTIPROC_DIR set, a scrape adds up all processes.

prometheus_client reads that variable when it is first imported: whoever starts several processes sets it before.
"""

import os
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from rooms.census import forget_dead
from rooms.domain.states import Reason

CONTENT_TYPE: Final = "text/plain; version=1.0.0; escaping=underscores"
MULTIPROCESS: Final = "PROMETHEUS_MULTIPROC_DIR"

_ATTEMPT_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30)
_PUBLISH_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_END_TO_END_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 15, 60, 300, 1800, 7200, 86400)


class Metrics:
    """The counters and histograms, each by the name it is known under.

    Labels are bounded: `outcome` of a publish is accepted, duplicate, invalid, refused or unavailable; of an attempt
    a state word (delivered, queued, sidelined, dropped, expired, held); `error` an ErrorClass or none; `status` 2xx …
    5xx or none; `outcome` of an ack acked, nacked, extended or late; of an orphan sidelined or discarded; of a handled
    message handled, sidelined, ignored or late; of a sandboxed check done, late (it exceeded its time or
    memory) or refused (of a request that could not wait longer); of a shoveled one queued, expired or too_often; of a name's look-up
    answered, refused, absent, failed, busy or stale; `bound` is all, organisation or endpoint; `reason` of a
    failed authentication is missing, malformed, checksum, unknown or limited. `queue` is the name of
    a handler queue in the store, `magazine` main or sideline; `process` is api, worker, upkeep, relay, standalone or handlers.
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.publishes = Counter("rooms_publishes", "Messages by what became of them.", ["outcome"], registry=registry)
        self.filter_errors = Counter(
            "rooms_filter_errors", "Filters that could not say, so that their message was delivered.", registry=registry
        )
        self.sandboxed = Counter(
            "rooms_sandbox_checks", "Schema and filter checks that ran in the sandbox, by outcome.", ["outcome"], registry=registry
        )  # fmt: skip
        self.order_mended = Counter(
            "rooms_order_mended", "Ordering keys without a head that upkeep had to pass on.", registry=registry
        )
        self.authentication_failures = Counter(
            "rooms_authentication_failures",
            "Requests refused for their API key, by why.",
            ["reason"],
            registry=registry,
        )
        self.publish_latency = Histogram(
            "rooms_publish_latency_seconds", "From request to answer.", buckets=_PUBLISH_S, registry=registry
        )
        self.attempts = Counter(
            "rooms_attempts", "Webhook attempts.", ["outcome", "error", "status"], registry=registry
        )
        self.attempt_latency = Histogram(
            "rooms_attempt_latency_seconds", "One webhook call.", buckets=_ATTEMPT_S, registry=registry
        )
        self.delivered_latency = Histogram(
            "rooms_delivered_latency_seconds",
            "From publish to the delivery's success, retries included.",
            buckets=_END_TO_END_S,
            registry=registry,
        )
        self.connection_waits = Counter(
            "rooms_webhook_connection_waits", "Webhook calls that waited for a connection, by the bound that was reached.",
            ["bound"], registry=registry,
        )  # fmt: skip
        self.name_lookups = Counter(
            "rooms_name_lookups",
            "Look-ups of webhook names by outcome; stale: addresses from before were used for want of an answer.",
            ["outcome"],
            registry=registry,
        )
        self.name_lookup_waits = Counter(
            "rooms_name_lookup_waits",
            "Look-ups that waited, by the bound that was reached.",
            ["bound"],
            registry=registry,
        )
        self.lane_changes = Counter(
            "rooms_lane_changes", "What workers found of endpoints and told each other.", ["change"], registry=registry
        )
        self.lanes_slowed = Gauge(
            "rooms_lanes_slowed", "Lanes of workers that trouble keeps below the concurrency they may have.",
            registry=registry, multiprocess_mode="livesum",
        )  # fmt: skip
        self.released = Counter(
            "rooms_released", "Held deliveries that went on, by why they were held and the way they went.", ["reason", "way"],
            registry=registry,
        )  # fmt: skip
        self.rate_limited = Counter(
            "rooms_rate_limited", "Times that a lane with a set rate got less of it than it could have begun.",
            registry=registry,
        )  # fmt: skip
        self.orphans = Counter(
            "rooms_orphans", "Copies without a delivery, by what became of them.", ["outcome"], registry=registry
        )
        self.pulls = Counter("rooms_pulls", "Pull requests.", registry=registry)
        self.pulled = Counter("rooms_pulled_messages", "Messages handed out by pull.", registry=registry)
        self.relayed = Counter("rooms_relayed", "Copies that the broker took from the relay.", registry=registry)
        self.relay_refused = Counter(
            "rooms_relay_refused", "Copies that go nowhere, by why.", ["reason"], registry=registry
        )
        self.relay_failures = Counter(
            "rooms_relay_failures", "Times that the broker was away when the relay had copies.", registry=registry
        )
        self._add_broker(registry)
        self.sideline_moved = Counter(
            "rooms_sideline_moved",
            "Sidelined deliveries by what a shovel or purge made of them.",
            ["outcome"],
            registry=registry,
        )
        self.sideline_swept = Counter("rooms_sideline_swept", "Stuck entries that were rescued.", registry=registry)
        self.sideline_sweeps = Counter(
            "rooms_sideline_sweeps", "Sweeps of all sidelines, by how they ended.", ["outcome"], registry=registry
        )
        self.sideline_lost = Counter(
            "rooms_sideline_lost", "Entries that their magazine had lost and that were loaded again.", registry=registry
        )
        self.queue_loaded = Counter(
            "rooms_handler_queue_loaded", "Messages put into handler queues.", ["queue"], registry=registry
        )
        self.queue_handled = Counter(
            "rooms_handler_queue_handled", "Messages that handlers had, by what became of them.", ["queue", "outcome"],
            registry=registry,
        )  # fmt: skip
        self.queue_shoveled = Counter(
            "rooms_handler_queue_shoveled", "Messages that a shovel took from the sideline of a handler queue.",
            ["queue", "outcome"], registry=registry,
        )  # fmt: skip
        self.queue_swept = Counter(
            "rooms_handler_queue_swept", "Stuck messages of handler queues that were rescued.", ["queue", "magazine"],
            registry=registry,
        )  # fmt: skip
        self.queue_sweep_failures = Counter(
            "rooms_handler_queue_sweep_failures",
            "Sweeps of a handler queue that came to no end.",
            ["queue"],
            registry=registry,
        )
        self.queue_depth = Gauge(
            "rooms_handler_queue_depth", "Live messages of a handler queue, by the magazine's counters.", ["queue", "magazine"],
            registry=registry, multiprocess_mode="livemostrecent",
        )  # fmt: skip
        self.queue_busy = Gauge(
            "rooms_handler_queue_busy", "Consumers of a handler queue that have a message.", ["queue"], registry=registry,
            multiprocess_mode="livesum",
        )  # fmt: skip
        self.queue_consumers = Gauge(
            "rooms_handler_queue_consumers", "Consumers of a handler queue.", ["queue"], registry=registry,
            multiprocess_mode="livesum",
        )  # fmt: skip
        self.log_exported = Counter(
            "rooms_log_exported", "Rows of the log that the upkeep exported.", registry=registry
        )
        self.log_gaps = Counter(
            "rooms_log_gaps",
            "Rows of the log that were written and are not there, as the export finds.",
            registry=registry,
        )
        self.log_held_back = Gauge(
            "rooms_log_held_back_seconds", "Age of the transaction that the export waits for; 0: it waits for none.",
            registry=registry, multiprocess_mode="livemostrecent",
        )  # fmt: skip
        self.retention_success = Gauge(
            "rooms_retention_success_timestamp_seconds", "When retention last went through everything.",
            registry=registry, multiprocess_mode="livemostrecent",
        )  # fmt: skip
        self.retention_oldest = Gauge(
            "rooms_retention_oldest_timestamp_seconds", "Where the oldest day begins that has everything still.",
            registry=registry, multiprocess_mode="livemostrecent",
        )  # fmt: skip
        self.retention_waits = Gauge(
            "rooms_retention_waiting", "Days that are over and cannot go yet: the export has not had them, or they are in use.",
            ["for"], registry=registry, multiprocess_mode="livemostrecent",
        )  # fmt: skip
        self.retention_remains = Gauge(
            "rooms_retention_remains", "Days, months and years of which only what must stay is there.",
            registry=registry, multiprocess_mode="livemostrecent",
        )  # fmt: skip
        self.retention_kept = Gauge(
            "rooms_retention_kept", "Deliveries that must stay of those days, at the last count.",
            registry=registry, multiprocess_mode="livemostrecent",
        )  # fmt: skip
        self.pull_consumers = Gauge(
            "rooms_pull_consumers", "Polls and streams that wait at PULL queues, by the set they stand in.", ["set"],
            registry=registry, multiprocess_mode="livesum",
        )  # fmt: skip
        self.loop_stalls = Counter(
            "rooms_loop_stalls", "Times that an event loop stood still for longer than ROOMS_LOOP_STALL_MS.", ["process"],
            registry=registry,
        )  # fmt: skip
        self.loop_longest_stall = Gauge(
            "rooms_loop_longest_stall_seconds", "The longest stall of an event loop since its process began.", ["process"],
            registry=registry, multiprocess_mode="livemax",
        )  # fmt: skip
        self._add_clients(registry)
        self.acks = Counter("rooms_acks", "Leases settled or extended.", ["outcome"], registry=registry)
        self._start_alerted()

    def _start_alerted(self) -> None:
        # Prometheus sees no increase in a series that begins above 0: the first failure would raise no alert.
        for counter, values in (
            (self.orphans, ("sidelined", "discarded")),
            (self.relay_refused, (Reason.UNREADABLE, Reason.SUBSCRIPTION_DELETED)),
            (self.sideline_moved, ("queued",)),
            (self.sideline_sweeps, ("done", "failed")),
            (self.lane_changes, ("tripped", "recovered", "failing", "well", "gone", "failed_long")),
        ):
            for value in values:
                counter.labels(value)

    def start_queue(self, queue: str) -> None:
        """Export the counters of a handler queue that raise alerts from 0 on; a second call does nothing."""
        self.queue_sweep_failures.labels(queue)
        self.queue_handled.labels(queue, "sidelined")
        self.queue_shoveled.labels(queue, "queued")
        for magazine in ("main", "sideline"):
            self.queue_swept.labels(queue, magazine)

    def _add_broker(self, registry: CollectorRegistry) -> None:
        """Make the metrics of another broker than PostgreSQL."""
        self.native_dead_letters = Counter(
            "rooms_native_dead_letters", "Copies that readers of native queues rejected, by what became of their deliveries.",
            ["outcome"], registry=registry,
        )  # fmt: skip
        self.native_queue_depth = Gauge(
            "rooms_native_queue_depth", "Messages that lie in all native queues at the broker.",
            registry=registry, multiprocess_mode="livemostrecent",
        )  # fmt: skip
        self.native_queue_deepest = Gauge(
            "rooms_native_queue_depth_max", "Messages that lie in the fullest native queue at the broker.",
            registry=registry, multiprocess_mode="livemostrecent",
        )  # fmt: skip
        self.broker_disk_usage = Gauge(
            "rooms_broker_disk_usage_ratio", "Used share of the disk that the broker writes to, 0 to 1.",
            registry=registry, multiprocess_mode="livemostrecent",
        )  # fmt: skip

    def _add_clients(self, registry: CollectorRegistry) -> None:
        self.pull_streams = Gauge(
            "rooms_pull_streams", "Streams that are open.", ["kind"], registry=registry, multiprocess_mode="livesum"
        )
        self.connections = Gauge(
            "rooms_http_connections", "Connections of clients, by whether a request on them had a valid key.",
            ["authenticated"], registry=registry, multiprocess_mode="livesum",
        )  # fmt: skip
        self.connections_closed = Counter(
            "rooms_http_connections_closed", "Connections that were closed for a bound, by which.", ["reason"],
            registry=registry,
        )  # fmt: skip
        self.consumers_refused = Counter(
            "rooms_pull_consumers_refused",
            "Streams and polls beyond what an organisation may have waiting.",
            registry=registry,
        )

    def lane_changed(self, change: str) -> None:
        """A circuit opened (tripped) or closed (recovered), an endpoint is failing, well again, or disabled (gone, failed_long)."""
        self.lane_changes.labels(change).inc()

    def waited_for_connection(self, bound: str) -> None:
        """Count a webhook call that had to wait for a connection."""
        self.connection_waits.labels(bound).inc()

    def looked_up(self, outcome: str) -> None:
        """Count the look-up of a name."""
        self.name_lookups.labels(outcome).inc()

    def waited_for_lookup(self, bound: str) -> None:
        """Count a look-up that had to wait."""
        self.name_lookup_waits.labels(bound).inc()

    def let_go(self, way: str, reason: str, count: int) -> None:
        """So many held deliveries went on: because their lane had room, by a drain, or as a circuit's probe."""
        self.released.labels(reason, way).inc(count)

    def authentication_failed(self, why: str) -> None:
        """Count a request that was refused for its API key."""
        self.authentication_failures.labels(why).inc()

    def dead_lettered(self, outcome: str, count: int) -> None:
        """Count copies that readers of native queues rejected."""
        self.native_dead_letters.labels(outcome).inc(count)

    def orphaned(self, sidelined: int, discarded: int) -> None:
        """So many orphans were found."""
        self.orphans.labels("sidelined").inc(sidelined)
        self.orphans.labels("discarded").inc(discarded)

    def text(self, *others: Collector) -> bytes:
        """The exposition of these metrics (of every process, where there are several) and of `others`."""
        gathered = CollectorRegistry()
        if folder := os.environ.get(MULTIPROCESS):
            forget_dead(Path(folder))
            MultiProcessCollector(gathered)  # type: ignore[no-untyped-call]
        else:
            gathered.register(_Registered(self._registry))
        for collector in others:
            gathered.register(collector)
        return generate_latest(gathered)


class _Registered(Collector):
    """A registry as one collector of another."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        """Everything the registry holds."""
        return self._registry.collect()


def status_label(status: int | None) -> str:
    """2xx … 5xx, or none."""
    return "none" if status is None else f"{status // 100}xx"


def observe_many(histogram: Histogram, values: Iterable[float]) -> None:
    """`histogram.observe` for many values at a fifth of its cost: each bucket and the sum are touched once.

    The buckets are the library's private part (of every version so far); a test holds this against `observe`.
    """
    bounds: list[float] = histogram._upper_bounds  # noqa: SLF001 - see above
    counts: dict[int, int] = {}
    total = 0.0
    for value in values:
        total += value
        bucket = bisect_left(bounds, value)
        counts[bucket] = counts.get(bucket, 0) + 1
    if counts:
        histogram._sum.inc(total)  # noqa: SLF001 - see above
        for bucket, count in counts.items():
            histogram._buckets[bucket].inc(count)  # noqa: SLF001 - see above
