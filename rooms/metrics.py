"""Define the Prometheus metrics. Each process has one `Metrics`.

With PROMETHEUS_MULTIPROC_DIR, set before the first import, a scrape adds up all processes here.
"""

import os
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from rooms.domain.state_machine import Reason
from rooms.prometheus_internals import RegistryCollector, remove_dead_gauges
from rooms.queue_series import QueueSeries

CONTENT_TYPE: Final = "text/plain; version=1.0.0; escaping=underscores"
MULTIPROCESS_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"

_ATTEMPT_BUCKETS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30,
)  # fmt: skip
_PUBLISH_BUCKETS_S: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5,
)  # fmt: skip
_END_TO_END_BUCKETS_S: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 15, 60, 300, 1800, 7200, 86400,
)  # fmt: skip


class Metrics:
    """Hold the counters, gauges and histograms of one process.

    All labels are bounded. `outcome` depends on the metric.

    - Publish. Values: accepted, duplicate, invalid, refused or unavailable.
    - Attempt. Values: delivered, queued, sidelined, dropped, expired or held.
    - Ack. Values: acked, nacked, extended or late.
    - Orphan. Values: sidelined or discarded.
    - Handled message. Values: handled, sidelined, ignored or late.
    - Shoveled message. Values: queued, expired, purged, too_often, stale or busy.
    - Check in the sandbox. Values: done, late (over its time or memory) or refused.
    - Look-up of a name. Values: answered, refused, absent, failed, busy or stale.
    - TLS handshake. Values: done, timeout, closed, protocol, no_certificate, not_yet_valid,
      expired, revoked, untrusted or revocation_list.
    - File of TLS with an end. Values: certificate or revocation_list.

    Other labels: `error` is an ErrorClass or none, and `status` is 2xx to 5xx or none. `bound` is
    all, organisation or endpoint, or schema or filter. `reason` of a failed authentication is
    missing, malformed, checksum, unknown, limited, network, certificate or forwarded. `step` of
    rests is publish, relay or claim. `queue` is the store name of a handler queue or other, and
    `magazine` is main or sideline. `cause` is a system's error, such as EMFILE. `process` is api,
    worker, upkeep, relay, standalone or handlers.
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.queue_series = QueueSeries(can_remove=MULTIPROCESS_VARIABLE not in os.environ)
        self.publishes = Counter(
            "rooms_publishes", "Published messages by outcome.", ["outcome"], registry=registry
        )
        self.filter_errors = Counter(
            "rooms_filter_errors",
            "Filters that failed, so that the message was delivered.",
            registry=registry,
        )
        self.sandboxed = Counter(
            "rooms_sandbox_checks",
            "Schema and filter checks that ran in the sandbox, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.bounds_refused = Counter(
            "rooms_bounds_refused",
            "Schemas and filters refused when made or tried, as they exceed a bound, by kind.",
            ["bound"],
            registry=registry,
        )
        self.ordering_repaired = Counter(
            "rooms_order_mended",
            "Ordering keys without a head that maintenance repaired.",
            registry=registry,
        )
        self._add_access_counters(registry)
        self.publish_latency = Histogram(
            "rooms_publish_latency_seconds",
            "Time from request to answer.",
            buckets=_PUBLISH_BUCKETS_S,
            registry=registry,
        )
        self.attempts = Counter(
            "rooms_attempts", "Webhook attempts.", ["outcome", "error", "status"], registry=registry
        )
        self.attempt_latency = Histogram(
            "rooms_attempt_latency_seconds",
            "Time of one webhook call.",
            buckets=_ATTEMPT_BUCKETS_S,
            registry=registry,
        )
        self.delivered_latency = Histogram(
            "rooms_delivered_latency_seconds",
            "Time from publish to the success of a delivery, with retries.",
            buckets=_END_TO_END_BUCKETS_S,
            registry=registry,
        )
        self._add_webhooks(registry)
        self.lane_changes = Counter(
            "rooms_lane_changes",
            "Changes of endpoint state that workers recorded.",
            ["change"],
            registry=registry,
        )
        self.lanes_throttled = Gauge(
            "rooms_lanes_slowed",
            "Lanes below their configured concurrency because of failures.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.released = Counter(
            "rooms_released",
            "Held deliveries that were released, by the reason of the hold and the way.",
            ["reason", "way"],
            registry=registry,
        )
        self.rate_limited = Counter(
            "rooms_rate_limited", "Times that a rate limit delayed a lane.", registry=registry
        )
        self.orphans = Counter(
            "rooms_orphans",
            "Orphaned tasks without a delivery, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.pulls = Counter("rooms_pulls", "Pull requests.", registry=registry)
        self.pulled = Counter(
            "rooms_pulled_messages", "Messages leased by pull requests.", registry=registry
        )
        self.relayed = Counter(
            "rooms_relayed", "Tasks that the broker accepted from the relay.", registry=registry
        )
        self.relay_refused = Counter(
            "rooms_relay_refused",
            "Tasks that the relay could not send, by reason.",
            ["reason"],
            registry=registry,
        )
        self.relay_failures = Counter(
            "rooms_relay_failures",
            "Times that the relay had tasks and the broker was unavailable.",
            registry=registry,
        )
        self._add_broker(registry)
        self.sideline_moved = Counter(
            "rooms_sideline_moved",
            "Sidelined deliveries that were shoveled or purged, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.sideline_swept = Counter(
            "rooms_sideline_swept", "Stuck entries that were rescued.", registry=registry
        )
        self.sideline_sweeps = Counter(
            "rooms_sideline_sweeps",
            "Sweeps of all sidelines, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.sideline_lost = Counter(
            "rooms_sideline_lost",
            "Entries that a magazine had lost and that were loaded again.",
            registry=registry,
        )
        self.queue_loaded = Counter(
            "rooms_handler_queue_loaded",
            "Messages loaded into handler queues.",
            ["queue"],
            registry=registry,
        )
        self.queue_handled = Counter(
            "rooms_handler_queue_handled",
            "Messages that handlers finished, by outcome.",
            ["queue", "outcome"],
            registry=registry,
        )
        self.queue_shoveled = Counter(
            "rooms_handler_queue_shoveled",
            "Messages shoveled from the sideline of a handler queue.",
            ["queue", "outcome"],
            registry=registry,
        )
        self.queue_swept = Counter(
            "rooms_handler_queue_swept",
            "Stuck messages of handler queues that were rescued.",
            ["queue", "magazine"],
            registry=registry,
        )
        self.queue_sweep_failures = Counter(
            "rooms_handler_queue_sweep_failures",
            "Sweeps of a handler queue that failed.",
            ["queue"],
            registry=registry,
        )
        self.queue_depth = Gauge(
            "rooms_handler_queue_depth",
            "Live messages of a handler queue, by the magazine's counters.",
            ["queue", "magazine"],
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.queue_busy_consumers = Gauge(
            "rooms_handler_queue_busy",
            "Consumers of a handler queue that process a message.",
            ["queue"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.queue_consumers = Gauge(
            "rooms_handler_queue_consumers",
            "Consumers of a handler queue.",
            ["queue"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.log_exported = Counter(
            "rooms_log_exported", "Entries of the log that were exported.", registry=registry
        )
        self.log_gaps = Counter(
            "rooms_log_gaps", "Entries of the log that the export found missing.", registry=registry
        )
        self.log_export_delay = Gauge(
            "rooms_log_held_back_seconds",
            "Age of the transaction that the export waits for; 0: none.",
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.retention_success = Gauge(
            "rooms_retention_success_timestamp_seconds",
            "Time when retention last completed.",
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.retention_oldest = Gauge(
            "rooms_retention_oldest_timestamp_seconds",
            "Begin of the oldest day that is complete.",
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.retention_waits = Gauge(
            "rooms_retention_waiting",
            "Days past retention that cannot be deleted yet, by reason: not exported, or in use.",
            ["for"],
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.retention_partial = Gauge(
            "rooms_retention_remains",
            "Days, months and years of which only unfinished data is left.",
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.retention_kept = Gauge(
            "rooms_retention_kept",
            "Deliveries left in those periods, at the last count.",
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.pull_consumers = Gauge(
            "rooms_pull_consumers",
            "Polls and streams that wait at PULL queues, by set.",
            ["set"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.loop_stalls = Counter(
            "rooms_loop_stalls",
            "Stalls of an event loop longer than ROOMS_LOOP_STALL_MS.",
            ["process"],
            registry=registry,
        )
        self.loop_longest_stall = Gauge(
            "rooms_loop_longest_stall_seconds",
            "Longest stall of an event loop since its process started.",
            ["process"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._add_clients(registry)
        self.acks = Counter(
            "rooms_acks", "Leases settled or extended.", ["outcome"], registry=registry
        )
        self._initialise_counters()

    def _add_webhooks(self, registry: CollectorRegistry) -> None:
        self.connection_waits = Counter(
            "rooms_webhook_connection_waits",
            "Webhook calls that waited for a connection, by the limit that was reached.",
            ["bound"],
            registry=registry,
        )
        self.webhook_shortages = Counter(
            "rooms_webhook_shortages",
            "Webhooks that were put off, because this process or machine lacked files or ports.",
            ["cause"],
            registry=registry,
        )
        self.name_lookups = Counter(
            "rooms_name_lookups",
            "Look-ups of webhook names by outcome; stale: no answer, so old addresses were used.",
            ["outcome"],
            registry=registry,
        )
        self.name_lookup_waits = Counter(
            "rooms_name_lookup_waits",
            "Look-ups that waited, by the limit that was reached.",
            ["bound"],
            registry=registry,
        )

    def _add_access_counters(self, registry: CollectorRegistry) -> None:
        self.authentication_failures = Counter(
            "rooms_authentication_failures",
            "Requests refused for their API key, by reason.",
            ["reason"],
            registry=registry,
        )
        self.journal_dropped = Counter(
            "rooms_journal_dropped",
            "Refused attempts that are not in the journal: too many, or PostgreSQL refused them.",
            registry=registry,
        )
        self.quota_refused = Counter(
            "rooms_quota_refused",
            "Requests that a quota refused, by limit.",
            ["limit"],
            registry=registry,
        )
        self.usage_delay = Gauge(
            "rooms_usage_delay_seconds",
            "Age of the time up to which usage is complete.",
            registry=registry,
            multiprocess_mode="livemostrecent",
        )

    def _add_tls(self, registry: CollectorRegistry) -> None:
        self.tls_handshakes = Counter(
            "rooms_tls_handshakes",
            "Handshakes of the TLS port, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.tls_reload_failed = Gauge(
            "rooms_tls_reload_failed",
            "1 while new files of TLS cannot be used, and the former ones are.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.tls_end = Gauge(
            "rooms_tls_end_timestamp_seconds",
            "End of the certificate of the TLS port, and earliest end of a revocation list.",
            ["file"],
            registry=registry,
            multiprocess_mode="livemin",
        )

    def _initialise_counters(self) -> None:
        # Prometheus sees no increase in a series that begins above 0: no alert, no first count.
        for counter, values in (
            (self.bounds_refused, ("schema", "filter")),
            (self.bulk_rests, ("publish", "relay", "claim")),
            (self.orphans, ("sidelined", "discarded")),
            (self.relay_refused, (Reason.UNREADABLE, Reason.SUBSCRIPTION_DELETED)),
            (self.sideline_moved, ("queued",)),
            (self.sideline_sweeps, ("done", "failed")),
            (self.connections_closed, ("files", "unauthenticated", "per_address", "organisation")),
            (self.lane_changes, ("tripped", "recovered", "failing", "well", "gone", "failed_long")),
        ):
            for value in values:
                counter.labels(value)

    def _add_broker(self, registry: CollectorRegistry) -> None:
        """Add the metrics of an external broker."""
        self.native_dead_letters = Counter(
            "rooms_native_dead_letters",
            "Messages that readers of native queues rejected, by outcome of their deliveries.",
            ["outcome"],
            registry=registry,
        )
        self.native_queue_depth = Gauge(
            "rooms_native_queue_depth",
            "Messages in all native queues at the broker.",
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.native_queue_depth_max = Gauge(
            "rooms_native_queue_depth_max",
            "Messages in the fullest native queue at the broker.",
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.broker_disk_usage = Gauge(
            "rooms_broker_disk_usage_ratio",
            "Used fraction of the disk of the broker, 0 to 1.",
            registry=registry,
            multiprocess_mode="livemostrecent",
        )

    def _add_clients(self, registry: CollectorRegistry) -> None:
        self._add_tls(registry)
        self.pull_streams = Gauge(
            "rooms_pull_streams",
            "Open streams.",
            ["kind"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.connections = Gauge(
            "rooms_http_connections",
            "Client connections, by whether a request on them had a valid API key.",
            ["authenticated"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.connections_closed = Counter(
            "rooms_http_connections_closed",
            "Client connections closed because of a limit, by limit.",
            ["reason"],
            registry=registry,
        )
        self.queries_refused = Counter(
            "rooms_organisation_queries_refused",
            "Queries refused because an organisation used its share of connections for 10 s.",
            registry=registry,
        )
        self.bulk_rests = Counter(
            "rooms_bulk_rests_seconds",
            "Rests of large publishes and backlogs for the sake of other organisations, by step.",
            ["step"],
            registry=registry,
        )
        self.consumers_refused = Counter(
            "rooms_pull_consumers_refused",
            "Streams and polls refused because an organisation reached its limit.",
            registry=registry,
        )

    def count_lane_change(self, change: str) -> None:
        """Count a change: tripped, recovered, failing, well, or disabled (gone, failed_long)."""
        self.lane_changes.labels(change).inc()

    def count_connection_wait(self, limit: str) -> None:
        """Count a webhook call that had to wait for a connection."""
        self.connection_waits.labels(limit).inc()

    def count_name_lookup(self, outcome: str) -> None:
        """Count the look-up of a name."""
        self.name_lookups.labels(outcome).inc()

    def count_lookup_wait(self, limit: str) -> None:
        """Count a look-up that had to wait."""
        self.name_lookup_waits.labels(limit).inc()

    def count_released(self, mode: str, reason: str, count: int) -> None:
        """Count held deliveries that were released, by reason of the hold and by the way."""
        self.released.labels(reason, mode).inc(count)

    def count_authentication_failure(self, reason: str) -> None:
        """Count a request that was refused for its API key."""
        self.authentication_failures.labels(reason).inc()

    def count_native_dead_letters(self, outcome: str, count: int) -> None:
        """Count messages that readers of native queues rejected."""
        self.native_dead_letters.labels(outcome).inc(count)

    def count_orphans(self, sidelined: int, discarded: int) -> None:
        """Count orphans."""
        self.orphans.labels("sidelined").inc(sidelined)
        self.orphans.labels("discarded").inc(discarded)

    def render(self, *others: Collector) -> bytes:
        """Return the exposition of these metrics, of every process, and of `others`."""
        gathered = CollectorRegistry()
        if folder := os.environ.get(MULTIPROCESS_VARIABLE):
            remove_dead_gauges(Path(folder))
            MultiProcessCollector(gathered)  # type: ignore[no-untyped-call]
        else:
            gathered.register(RegistryCollector(self._registry))
        for collector in others:
            gathered.register(collector)
        return generate_latest(gathered)


def status_label(status: int | None) -> str:
    """Return 2xx to 5xx, or none."""
    return "none" if status is None else f"{status // 100}xx"
