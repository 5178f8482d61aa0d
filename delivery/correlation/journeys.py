"""Journeys: what became of each delivery, from its rows in whatever order and however often they came.

A partition's rows become one row a delivery (`partial`); those of all partitions are put together (`merge`). Every
aggregate is a minimum, maximum, sum or OR of whole numbers: it merges exactly, and Spark never has to sort for it.
"""

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from delivery.correlation.conformance import BEGIN, CODE_MASK, CODES, DEAD, FINALS, STARTS, TABLE
from rooms.domain.states import LogKind

GRACE_MS: Final = 3_600_000
"""A push delivery that waits is lost when its subscription was served what came this much later."""

_IDS: Final = ("delivery_hi", "delivery_lo")
_HOUR_MS: Final = 3_600_000
_FEW: Final = 200_000
"""Deliveries with rows of several hours that are told to every task; where they are more, all deliveries are put together."""
_BIRTHS: Final = (LogKind.ENQUEUED, LogKind.REPLAYED)
"""A replay makes a delivery that no publish told of; its one row tells of both."""
_PLAIN: Final = (
    LogKind.ENQUEUED, LogKind.ATTEMPTED, LogKind.RETRY_SCHEDULED, LogKind.DELIVERED, LogKind.SIDELINED, LogKind.DROPPED,
    LogKind.EXPIRED, LogKind.CANCELLED, LogKind.LEASED, LogKind.PULL_ACKED,
)  # fmt: skip
_ENDS: Final = (LogKind.DELIVERED, LogKind.SIDELINED, LogKind.DROPPED, LogKind.EXPIRED, LogKind.CANCELLED)
_OUTCOMES: Final = {
    LogKind.DELIVERED: "delivered",
    LogKind.PULL_ACKED: "acked",
    LogKind.HANDED_OVER: "handed_over",
    LogKind.EXPIRED: "expired",
    LogKind.CANCELLED: "cancelled",
    LogKind.DROPPED: "dropped",
    LogKind.PURGED: "purged",
    LogKind.SIDELINED: "sidelined",
    LogKind.HELD: "held",
    LogKind.LEASED: "in_flight",
    LogKind.ATTEMPTED: "in_flight",
}
OUTCOMES: Final = (*dict.fromkeys(_OUTCOMES.values()), "waiting", "lost")
"""Where a delivery may stand; each stands in exactly one."""

UNREPEATED: Final = (
    "delivery_id", "message_id", "delivery_hi", "delivery_lo", "message_hi", "message_lo", "last_key", "latency_us",
    "enqueued_us", "first_us", "first_attempt_us", "finished_us", "last_us", "due_us",
)  # fmt: skip
"""Columns whose values hardly come twice: a dictionary of them, which Parquet would try to make, is nothing but work."""
_SUMS: Final = (
    "events", "enqueued", "attempts", "successes", "retries", "retry_steps", "leases", "ends", "finals", "backoff_ms",
    "latency_us",
)  # fmt: skip
_LEASTS: Final = ("enqueued_us", "first_us", "first_attempt_us", "finished_us")
_GREATESTS: Final = (
    "room_id", "message_hi", "message_lo", "sub_key", "type_key", "host_key", "event_version", "last_us", "last_key", "due_us",
    "generation",
)  # fmt: skip


def _is(*kinds: LogKind) -> Column:
    return F.col("code").isin([CODES[kind] for kind in kinds])


def _count(condition: Column) -> Column:
    # Shorter than a sum of ones and noughts: nothing in it can be null or overflow.
    return F.count(F.when(condition, 1))


def partial(rows: DataFrame) -> DataFrame:
    """One row a partition and delivery."""
    attempted, retried = _is(LogKind.ATTEMPTED), _is(LogKind.RETRY_SCHEDULED)
    due = F.col("ts_us") + F.coalesce("delay_ms", F.lit(0)) * 1000
    return (
        rows.where("delivery_hi is not null")
        .groupBy("part", "delivery_hi", "delivery_lo")
        .agg(
            F.count(F.lit(1)).alias("events"),
            _count(_is(*_BIRTHS)).alias("enqueued"),
            _count(attempted).alias("attempts"),
            _count(attempted & F.col("error_class").isNull()).alias("successes"),
            _count(retried).alias("retries"),
            F.sum(F.when(retried, F.col("attempt")).otherwise(0)).cast("bigint").alias("retry_steps"),
            _count(_is(LogKind.LEASED)).alias("leases"),
            _count(_is(*_ENDS)).alias("ends"),
            _count(_is(*FINALS)).alias("finals"),
            F.sum(F.when(retried, F.col("delay_ms")).otherwise(0)).alias("backoff_ms"),
            F.sum(F.when(attempted, F.col("latency_us")).otherwise(0)).alias("latency_us"),
            F.min(F.when(_is(*_BIRTHS), F.col("ts_us"))).alias("enqueued_us"),
            F.min("ts_us").alias("first_us"),
            F.min(F.when(attempted, F.col("ts_us"))).alias("first_attempt_us"),
            F.min(F.when(_is(*FINALS, *_ENDS, LogKind.HANDED_OVER), F.col("ts_us"))).alias("finished_us"),
            F.max("room_id").alias("room_id"),
            F.max("message_hi").alias("message_hi"),
            F.max("message_lo").alias("message_lo"),
            F.max("sub_key").alias("sub_key"),
            F.max("type_key").alias("type_key"),
            F.max("host_key").alias("host_key"),
            F.max("event_version").alias("event_version"),
            F.max("ts_us").alias("last_us"),
            F.max("order_key").alias("last_key"),
            F.max(F.when(_is(*STARTS), due)).alias("due_us"),
            F.max("generation").alias("generation"),
            F.bit_or(F.expr("shiftleft(1, code)")).alias("kinds"),
        )
    )


def merge(partials: DataFrame) -> DataFrame:
    """One row a delivery, with where it stands; `waiting` may still turn out to be lost."""
    return _standing(_summed(partials))


def merge_hours(partials: DataFrame) -> DataFrame:
    """The same, sooner where most deliveries have all their rows in one hour: these are one already, and stay where they are."""
    strays = partials.where(_astray()).select(*_IDS)
    if strays.limit(_FEW + 1).count() > _FEW:
        return merge(partials)
    known = F.broadcast(strays.distinct())
    whole = partials.join(known, list(_IDS), "left_anti").drop("part")
    torn = partials.join(known, list(_IDS), "left_semi")
    return _standing(whole.unionByName(_summed(torn)))


def _astray() -> Column:
    """Whether a row is of another hour than its message's birth. A delivery with rows of two hours has at least one such."""
    return F.expr(f"shiftrightunsigned(message_hi, 16) div {_HOUR_MS} <> part")


def _summed(partials: DataFrame) -> DataFrame:
    return partials.groupBy(*_IDS).agg(
        *(F.sum(name).alias(name) for name in _SUMS),
        *(F.min(name).alias(name) for name in _LEASTS),
        *(F.max(name).alias(name) for name in _GREATESTS),
        F.bit_or("kinds").alias("kinds"),
    )


def _standing(merged: DataFrame) -> DataFrame:
    last = F.col("last_key").bitwiseAND(CODE_MASK)
    outcome = F.lit("waiting")
    for kind, told in _OUTCOMES.items():
        outcome = F.when(last == CODES[kind], told).otherwise(outcome)
    allowed = sum(1 << CODES[kind] for kind in _PLAIN)
    # Queued again and again, with one end at most: nothing in it that any automaton would refuse. A pulled one is plain
    # when it was leased once.
    pushed = (F.col("leases") == 0) & (F.col("ends") <= 1) & (F.col("finals") <= 1)
    acked = F.col("kinds").bitwiseAND(1 << CODES[LogKind.PULL_ACKED]) != 0
    pulled = (F.col("leases") == 1) & (F.col("retries") == 0) & (F.col("ends") == 0) & (F.col("finals") <= 1)
    plain = (
        (F.col("enqueued") == 1)
        & (F.col("kinds").bitwiseAND(~allowed) == 0)
        & (F.col("generation") == 0)
        & (F.col("retry_steps") * 2 == F.col("retries") * (F.col("retries") + 1))
        & (pushed | pulled)
        & (((F.col("leases") > 0) == acked) | (F.col("finals") == 0))
    )
    return merged.withColumn("outcome", outcome).withColumn("plain", plain)


def with_lost(merged: DataFrame, served: DataFrame) -> DataFrame:
    """The same, with `lost` where no state explains that a delivery waits.

    `served`: (sub_key, served_ms), the millisecond of the newest message that was attempted at a subscription in its turn.
    A delivery that was due an hour before that, and still waits, was passed over. Whatever is due later, or belongs to a
    subscription that nobody serves (paused, disabled, pulled by nobody), waits.
    """
    passed = F.col("due_us") + GRACE_MS * 1000 < F.col("served_ms") * 1000
    lost = (F.col("outcome") == "waiting") & F.coalesce(passed, F.lit(False))
    joined = merged.join(F.broadcast(served), "sub_key", "left")
    return joined.withColumn("outcome", F.when(lost, "lost").otherwise(F.col("outcome"))).drop("served_ms")


def paths(rows: DataFrame) -> DataFrame:
    """(delivery_hi, delivery_lo, events, path, legal): the kinds of these deliveries in their order, against the automaton."""
    codes = F.transform(F.sort_array(F.collect_list("order_key")), lambda key: key.bitwiseAND(CODE_MASK))
    width = len(TABLE[0])
    table = F.array(*(F.lit(state) for row in TABLE for state in row))
    step = F.aggregate("codes", F.lit(BEGIN), lambda state, code: F.get(table, (state * width + code).cast("int")))
    names = F.array(F.lit("unknown"), *(F.lit(kind.value) for kind in CODES))
    told = F.concat_ws(" ", F.transform("codes", lambda code: F.get(names, code.cast("int"))))
    found = rows.groupBy("delivery_hi", "delivery_lo").agg(F.count(F.lit(1)).alias("events"), codes.alias("codes"))
    return found.select("delivery_hi", "delivery_lo", "events", told.alias("path"), (step != DEAD).alias("legal"))


def anomaly() -> Column:
    """The word for what cannot be with a journey; null where everything is as it has to be."""
    return (
        F.when(F.col("enqueued") == 0, "never_enqueued")
        .when(F.col("enqueued") > 1, "enqueued_twice")
        .when(~F.coalesce("legal", F.lit(True)), "illegal_path")
        .when((F.col("outcome") == "delivered") & (F.col("successes") == 0), "delivered_without_success")
    )


def identity(hi: str, lo: str) -> Column:
    """The text of an id from its halves."""
    # As bytes: a text is cut by counting its characters from the beginning.
    high, low = (F.lpad(F.lower(F.hex(half)).cast("binary"), F.lit(16), F.lit(b"0")) for half in (hi, lo))
    cuts = ((high, 1, 8), (high, 9, 4), (high, 13, 4), (low, 1, 4), (low, 5, 12))
    first, *others = (F.substring(half, start, length) for half, start, length in cuts)
    return F.concat(first, *(piece for cut in others for piece in (F.lit(b"-"), cut))).cast("string")


def with_message(rows: DataFrame) -> DataFrame:
    """The same, with the text of the message's id."""
    return rows.withColumn("message_id", identity("message_hi", "message_lo"))


def outcomes(whole: DataFrame) -> DataFrame:
    """(room_id, subscription_id, outcome, deliveries, attempts, duplicates)."""
    return whole.groupBy("room_id", "subscription_id", "outcome").agg(
        F.count(F.lit(1)).alias("deliveries"),
        F.sum("attempts").alias("attempts"),
        F.sum(F.greatest(F.col("successes") - 1, F.lit(0))).alias("duplicates"),
    )
