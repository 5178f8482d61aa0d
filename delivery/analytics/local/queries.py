"""Compute the result tables from the state of all partitions, by SQL.

Each table of the state is a view of its name: numbers, deliveries, anchors, rollups, cells, causes.
The queries follow those of `delivery.analytics.spark`, which has the reasons; a test compares both.
"""

from typing import Final

from delivery.analytics.findings.advice import BY_ATTEMPT
from delivery.analytics.findings.cells import GROUPED_BY, SAMPLE_DIGITS, SAMPLE_SEPARATOR
from delivery.analytics.findings.series import BIN_S
from delivery.analytics.local.counting import ROLLUP_KEYS
from delivery.analytics.runs.conformance import CODE_MASK, CODES
from delivery.analytics.runs.outcomes import (
    AGED,
    ATTEMPT_US,
    GRACE_US,
    HOUR_US,
    LEASE_US,
    ORDINARY_KINDS,
    OUTCOME_BY_KIND,
    OUTCOMES,
    PENDING,
    PENDING_US,
    UNSERVED_US,
    UnreadHours,
)
from delivery.analytics.runs.tables import COUNTS, MAXIMA, MEASURES, MINIMA, SHARES, SUMS
from rooms.domain.state_machine import LogKind

_LAST: Final = f"(last_key & {CODE_MASK})"


def _texts(*values: str) -> str:
    return ", ".join(f"'{value}'" for value in values)


def _sums(*names: str) -> str:
    return ", ".join(f"sum({name})::BIGINT AS {name}" for name in names)


MACROS: Final = """
CREATE OR REPLACE MACRO hex64(half) AS lpad(lower(to_hex(half)), 16, '0');
CREATE OR REPLACE MACRO id_text(hi, lo) AS hex64(hi)[1:8] || '-' || hex64(hi)[9:12] || '-'
    || hex64(hi)[13:16] || '-' || hex64(lo)[1:4] || '-' || hex64(lo)[5:16];
CREATE OR REPLACE MACRO share_of(sorted, share) AS
    sorted[floor((len(sorted) - 1) * share)::BIGINT + 1]
    + ((len(sorted) - 1) * share - floor((len(sorted) - 1) * share))
    * (sorted[ceil((len(sorted) - 1) * share)::BIGINT + 1]
        - sorted[floor((len(sorted) - 1) * share)::BIGINT + 1]);
CREATE OR REPLACE MACRO value_at(sorted, share) AS
    sorted[greatest(ceil(len(sorted) * share)::BIGINT, 1)];
"""
GAPS: Final = """
WITH ranges AS (
    SELECT writer_id, first_seq, coalesce(max(last_seq) OVER (
        PARTITION BY writer_id ORDER BY first_seq, last_seq
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS seen
    FROM numbers
)
SELECT writer_id, seen + 1 AS first_seq, first_seq - 1 AS last_seq, first_seq - 1 - seen AS missing,
    seen = 0 AS before
FROM ranges WHERE first_seq > seen + 1
"""
_ACKED: Final = f"((kinds & {1 << CODES[LogKind.PULL_ACKED]}) <> 0)"
_PLAIN: Final = f"""
enqueued = 1 AND (kinds & {~sum(1 << CODES[kind] for kind in ORDINARY_KINDS)}) = 0
AND generation = 0 AND retry_steps * 2 = retries * (retries + 1)
AND ((leases = 0 AND ends <= 1 AND finals <= 1)
    OR (leases = 1 AND retries = 0 AND ends = 0 AND finals <= 1))
AND ((leases > 0) = {_ACKED} OR finals = 0)
"""
_OUTCOME: Final = (
    f"CASE {_LAST} "
    + " ".join(f"WHEN {CODES[kind]} THEN '{name}'" for kind, name in OUTCOME_BY_KIND.items())
    + " ELSE 'waiting' END"
)
_NOT_WAITING: Final = ", ".join(
    str(CODES[kind])
    for kind in (LogKind.LEASED, LogKind.ATTEMPTED, LogKind.HELD, LogKind.SIDELINED)
)


def journeys(*, end_us: int, unread: UnreadHours) -> str:
    """Return the query of all journeys, with keys."""
    later = "true" if unread.anywhere else f"last_us < {unread.later_before_us or 0}"
    return f"""
WITH merged AS (
    SELECT delivery_hi, delivery_lo, {_sums(*SUMS)},
        {", ".join(f"min({name}) AS {name}" for name in MINIMA)},
        {", ".join(f"max({name}) AS {name}" for name in MAXIMA)},
        bit_or(kinds) AS kinds
    FROM deliveries GROUP BY delivery_hi, delivery_lo
), service AS (
    SELECT sub_key, max(served_ms) AS served_ms, max(serviced_us) AS serviced_us
    FROM rollups WHERE serviced_us IS NOT NULL AND sub_key IS NOT NULL GROUP BY sub_key
), named AS (
    SELECT m.*, {_OUTCOME} AS found, ({_PLAIN}) AS plain, served_ms, serviced_us,
        CASE WHEN {_LAST} IN ({_NOT_WAITING}) THEN last_us ELSE coalesce(due_us, last_us) END
            AS since_us
    FROM merged m LEFT JOIN service USING (sub_key)
)
SELECT * EXCLUDE (found, served_ms, serviced_us), CASE
    WHEN found NOT IN ({_texts(*PENDING)}) THEN found
    WHEN {later} THEN 'unknown'
    WHEN found = 'waiting' AND coalesce(due_us + {GRACE_US} < served_ms * 1000, false) THEN 'lost'
    WHEN CASE
        WHEN found = 'in_flight' THEN {end_us} - since_us > CASE {_LAST}
            WHEN {CODES[LogKind.LEASED]} THEN {LEASE_US} ELSE {ATTEMPT_US} END
        ELSE {end_us} - since_us > {PENDING_US} OR ({end_us} - since_us > {UNSERVED_US}
            AND {end_us} - coalesce(serviced_us, 0) > {UNSERVED_US})
        END THEN 'stuck'
    ELSE found END AS outcome
FROM named
"""


_NAMED_KEYS: Final = """
    LEFT JOIN known s ON s.what = 'subscription' AND s.key = sub_key
    LEFT JOIN known t ON t.what = 'type' AND t.key = type_key
    LEFT JOIN known h ON h.what = 'host' AND h.key = host_key
"""
_NAMES: Final = "s.name AS subscription_id, t.name AS event_type, h.name AS target_host"
JOURNEYS: Final = f"""
SELECT j.*, id_text(delivery_hi, delivery_lo) AS delivery_id,
    id_text(message_hi, message_lo) AS message_id, {_NAMES}
FROM whole j {_NAMED_KEYS}
"""
OUTCOME_COUNTS: Final = """
SELECT room_id, s.name AS subscription_id, outcome, count(*) AS deliveries,
    sum(attempts)::BIGINT AS attempts, sum(greatest(successes - 1, 0))::BIGINT AS duplicates
FROM whole LEFT JOIN known s ON s.what = 'subscription' AND s.key = sub_key
GROUP BY ALL
"""


def ages(*, end_us: int) -> str:
    """Return the query of `ages`."""
    return f"""
SELECT room_id, s.name AS subscription_id, outcome, deliveries,
    make_timestamptz(oldest.since_us) AS oldest_since,
    greatest({end_us} - oldest.since_us, 0) / 1e6 AS oldest_age_s, oldest.id AS oldest_delivery_id
FROM (
    SELECT room_id, sub_key, outcome, count(*) AS deliveries,
        min({{'since_us': since_us, 'id': id_text(delivery_hi, delivery_lo)}}) AS oldest
    FROM whole WHERE outcome IN ({_texts(*AGED)}) GROUP BY ALL
) LEFT JOIN known s ON s.what = 'subscription' AND s.key = sub_key
"""


def balances(unread: UnreadHours) -> str:
    """Return the query of messages whose rows disagree, or with deliveries not created once."""
    if unread.anywhere:
        may_be_unread = "true"
    elif unread.parts:
        may_be_unread = f"part IN ({', '.join(map(str, sorted(unread.parts)))})"
    else:
        may_be_unread = "false"
    return f"""
WITH odd AS (
    SELECT room_id, message_hi, message_lo, min(part) AS part,
        {_sums("anchored", "fanout", "enqueued")}
    FROM anchors WHERE message_hi IS NOT NULL GROUP BY ALL
), not_created_once AS (
    SELECT room_id, message_hi, message_lo, count(*) FILTER (enqueued = 0) AS found,
        sum(greatest(enqueued - 1, 0))::BIGINT AS repeated,
        min(first_us // {HOUR_US}) FILTER (enqueued = 0) AS first_part,
        min(enqueued_us // {HOUR_US}) FILTER (enqueued > 1) AS repeated_part
    FROM whole WHERE enqueued <> 1 GROUP BY ALL
), both_sides AS (
    SELECT room_id, message_hi, message_lo,
        coalesce(least(part, repeated_part), first_part)::INTEGER AS part,
        (anchored IS NOT NULL)::BIGINT AS messages, coalesce(anchored, 0) AS anchored,
        coalesce(fanout, 0) AS fanout, coalesce(enqueued, 0) AS enqueued,
        coalesce(found, 0) AS found, coalesce(repeated, 0) AS repeated
    FROM odd FULL JOIN not_created_once USING (room_id, message_hi, message_lo)
), judged AS (
    SELECT *, fanout - enqueued - found + repeated AS gap, greatest(gap, 0) AS lacking
    FROM both_sides
)
SELECT * EXCLUDE (gap, lacking, repeated),
    CASE WHEN {may_be_unread} THEN 0 ELSE lacking END AS missing,
    CASE WHEN {may_be_unread} THEN lacking ELSE 0 END AS unread,
    CASE WHEN anchored > 0 THEN greatest(-gap, 0) ELSE 0 END AS excess,
    CASE WHEN anchored > 0 THEN 0 ELSE greatest(-gap, 0) END AS unanchored
FROM judged
"""


MISSING: Final = """
SELECT room_id, id_text(message_hi, message_lo) AS message_id,
    count(w.delivery_hi) + b.missing AS fanout, coalesce(sum(w.enqueued), 0)::BIGINT AS enqueued,
    count(*) FILTER (w.enqueued = 0) AS found, b.missing
FROM balances b LEFT JOIN whole w USING (room_id, message_hi, message_lo)
WHERE b.missing > 0 GROUP BY room_id, message_hi, message_lo, b.missing
"""
_BY_MESSAGE: Final = ("messages", "fanout", "missing", "unread", "excess", "unanchored")
_BY_DELIVERY: Final = ("enqueued", "never_enqueued", "enqueued_twice", "duplicates", *OUTCOMES)
_COUNTED: Final = " - ".join(OUTCOMES)
RECONCILIATION: Final = f"""
WITH by_message AS (
    SELECT part AS hour, room_id, {_sums(*_BY_MESSAGE)} FROM (
        SELECT part, room_id, messages, fanout, 0 AS missing, 0 AS unread, 0 AS excess,
            0 AS unanchored
        FROM anchors WHERE message_hi IS NULL
        UNION ALL SELECT part, room_id, {", ".join(_BY_MESSAGE)} FROM balances
    ) GROUP BY ALL
), deliveries_by_hour AS (
    SELECT (enqueued_us // {HOUR_US})::INTEGER AS hour, room_id, enqueued, successes, outcome
    FROM whole WHERE enqueued > 0
    UNION ALL
    SELECT b.part AS hour, room_id, w.enqueued, w.successes, w.outcome
    FROM whole w JOIN balances b USING (room_id, message_hi, message_lo) WHERE w.enqueued = 0
), by_delivery AS (
    SELECT hour, room_id, sum(enqueued)::BIGINT AS enqueued,
        count(*) FILTER (enqueued = 0) AS never_enqueued,
        sum(greatest(enqueued - 1, 0))::BIGINT AS enqueued_twice,
        sum(greatest(successes - 1, 0))::BIGINT AS duplicates,
        {", ".join(f"count(*) FILTER (outcome = '{name}') AS {name}" for name in OUTCOMES)}
    FROM deliveries_by_hour GROUP BY ALL
), both_sides AS (
    SELECT hour, room_id,
        {", ".join(f"coalesce({name}, 0) AS {name}" for name in (*_BY_MESSAGE, *_BY_DELIVERY))}
    FROM by_message FULL JOIN by_delivery USING (hour, room_id)
)
SELECT * REPLACE (to_timestamp(hour::BIGINT * 3600) AS hour),
    fanout + excess + unanchored - missing - unread - enqueued + enqueued_twice - never_enqueued
        AS residual_fanout,
    enqueued + never_enqueued - enqueued_twice - {_COUNTED} AS residual_outcome
FROM both_sides
"""


def _percentiles(macro: str) -> str:
    return ", ".join(
        f"{macro}({measure}, {share}::DOUBLE) AS {measure}_{percentile}_ms"
        for measure in MEASURES
        for percentile, share in SHARES.items()
    )


HOURLY: Final = f"""
SELECT to_timestamp(part::BIGINT * 3600) AS hour, room_id, {_NAMES}, {", ".join(COUNTS)},
    {_percentiles("share_of")}
FROM rollups {_NAMED_KEYS}
"""
DAILY: Final = f"""
SELECT DATE '1970-01-01' + day::INTEGER AS day, room_id, {_NAMES}, {", ".join(COUNTS)},
    {_percentiles("value_at")}
FROM (
    SELECT part // 24 AS day, {", ".join(ROLLUP_KEYS)}, {_sums(*COUNTS)},
        {", ".join(f"list_sort(flatten(list({name}))) AS {name}" for name in MEASURES)}
    FROM rollups GROUP BY ALL
) {_NAMED_KEYS}
"""
"""Exact percentiles: each is a value that occurred, as those of sketches are."""
SUCCESS_RATES: Final = f"""
SELECT room_id, sub_key, attempt, {_sums(*BY_ATTEMPT)},
    min(delay_ms) FILTER (retries = 1) AS shortest_ms,
    max(delay_ms) FILTER (retries = 1) AS longest_ms,
    CASE WHEN sum(attempts) > 0 THEN sum(successes)::DOUBLE / sum(attempts)::DOUBLE END AS hazard,
    CASE WHEN sum(retries) > 0 THEN sum(delay_ms)::DOUBLE / sum(retries)::DOUBLE END
        AS mean_delay_ms
FROM cells WHERE sub_key IS NOT NULL GROUP BY room_id, sub_key, attempt
"""
ATTEMPTS_BY_BIN: Final = """
SELECT sub_key, bin, sum(attempts)::BIGINT AS attempts, sum(successes)::BIGINT AS successes
FROM cells WHERE attempts > 0 AND list_contains(?, sub_key) GROUP BY sub_key, bin
"""
_ASIDE: Final = f"((kinds & {1 << CODES[LogKind.SIDELINED]}) <> 0)"
ARRIVALS: Final = f"""
SELECT sub_key, first_attempt_us // {BIN_S * 1_000_000} AS bin, attempts AS tries,
    CASE WHEN {_ASIDE} THEN 0 ELSE 1 END AS delivered, count(*) AS count
FROM whole
WHERE (outcome = 'delivered' OR {_ASIDE}) AND first_attempt_us IS NOT NULL
    AND list_contains(?, sub_key)
GROUP BY ALL
"""
CAUSES: Final = """
SELECT c.* EXCLUDE (part, host_key, type_key), h.name AS target_host, t.name AS event_type
FROM causes c
    LEFT JOIN known t ON t.what = 'type' AND t.key = type_key
    LEFT JOIN known h ON h.what = 'host' AND h.key = host_key
"""


def sampled_causes(step: int) -> str:
    """Return the query of every `step`-th row of CAUSES, as Spark samples them."""
    texts = ", ".join(f"coalesce({name}::VARCHAR, '')" for name in GROUPED_BY)
    digits = f"substr(md5(concat_ws(chr({ord(SAMPLE_SEPARATOR)}), {texts})), 1, {SAMPLE_DIGITS})"
    return f"SELECT * FROM ({CAUSES}) WHERE ('0x' || {digits})::BIGINT % {step} = 0"


ANOMALIES: Final = """
SELECT j.delivery_id, j.message_id, j.room_id, j.subscription_id, j.outcome, path, CASE
    WHEN enqueued = 0 THEN 'never_enqueued'
    WHEN enqueued > 1 THEN 'enqueued_twice'
    WHEN NOT coalesce(legal, true) THEN 'illegal_path'
    WHEN outcome = 'delivered' AND successes = 0 THEN 'delivered_without_success' END AS anomaly
FROM named_journeys j LEFT JOIN paths p USING (delivery_hi, delivery_lo)
WHERE anomaly IS NOT NULL
"""
