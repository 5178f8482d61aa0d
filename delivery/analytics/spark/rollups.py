"""Roll up counts and latencies by hour and day, room, subscription, event type and host."""

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from delivery.analytics.runs.conformance import CODES
from delivery.analytics.runs.tables import COUNTED, COUNTS, KEYS, MEASURES, SERVICE, SHARES
from rooms.domain.state_machine import LogKind

SKETCH_K: Final = 400
"""Sketch size: the rank error of daily percentiles is below 1 % with 99 % confidence."""


def _is_kind(kinds: tuple[LogKind, ...]) -> Column:
    return F.col("code").isin([CODES[kind] for kind in kinds])


def hourly_state(rows: DataFrame) -> DataFrame:
    """Return counts, exact percentiles and mergeable sketches of a partition, with text keys.

    `latency`: duration of an attempt. `end_to_end`: from the millisecond in the message id to
    delivery or ack.
    """
    attempted = _is_kind((LogKind.ATTEMPTED,))
    ended = _is_kind((LogKind.DELIVERED, LogKind.PULL_ACKED))
    latency = F.when(attempted, F.col("latency_us") / 1e3)
    whole = F.when(ended, F.greatest((F.col("ts_us") - F.col("born_ms") * 1000) / 1e3, F.lit(0.0)))
    valued = rows.withColumn("latency", latency).withColumn("end_to_end", whole)
    first_try = attempted & (F.col("generation") == 0) & (F.col("attempt") == 0)
    grouped = valued.groupBy("part", *KEYS).agg(
        # Counts instead of sums, which can be null or overflow.
        *(F.count(F.when(_is_kind(kinds), 1)).alias(name) for name, kinds in COUNTED.items()),
        F.count(F.when(attempted & F.col("error_class").isNotNull(), 1)).alias("failures"),
        F.count(F.when(attempted & F.col("http_status").isNull(), 1)).alias("unanswered"),
        F.max(F.when(first_try, F.col("born_ms"))).alias("served_ms"),
        F.max(F.when(_is_kind(SERVICE), F.col("ts_us"))).alias("serviced_us"),
        # Spark's exact percentile shuffles a table of all values with their counts.
        *(F.sort_array(F.collect_list(name)).alias(f"{name}_sorted") for name in MEASURES),
        *(
            F.kll_sketch_agg_double(name, F.lit(SKETCH_K)).alias(f"{name}_sketch")
            for name in MEASURES
        ),
        *(F.count(name).alias(f"{name}_n") for name in MEASURES),
        # All rows of a group have the same; hashing again costs more.
        *(F.max(key).alias(key) for key in ("sub_key", "type_key", "host_key")),
    )
    exact = {f"{name}_exact": _percentiles(F.col(f"{name}_sorted")) for name in MEASURES}
    return grouped.withColumns(exact).drop(*(f"{name}_sorted" for name in MEASURES))


def _percentiles(ascending: Column) -> Column:
    """Interpolate the value at each share; null without values."""

    def at(share: Column) -> Column:
        place = (F.size(ascending) - 1) * share
        below, above = (F.get(ascending, end(place).cast("int")) for end in (F.floor, F.ceil))
        return below + (place - F.floor(place)) * (above - below)

    found = F.transform(F.array(*map(F.lit, SHARES.values())), at)
    return F.when(F.size(ascending) > 0, found)


def hourly(state: DataFrame) -> DataFrame:
    """Return the hourly rows with names and percentiles."""
    percentiles = (
        F.get(f"{name}_exact", F.lit(place)).alias(f"{name}_{share}_ms")
        for name in MEASURES
        for place, share in enumerate(SHARES)
    )
    hour = F.timestamp_seconds(F.col("part").cast("bigint") * 3600).alias("hour")
    return state.select(hour, *KEYS, *COUNTS, *percentiles)


def daily(state: DataFrame) -> DataFrame:
    """Return daily sums, and percentiles from merged hourly sketches with bounded rank error."""
    day = F.date_from_unix_date(F.floor(F.col("part") / F.lit(24)).cast("int")).alias("day")
    merged = state.groupBy(day, *KEYS).agg(
        *(F.sum(name).alias(name) for name in COUNTS),
        *(F.sum(f"{name}_n").alias(f"{name}_n") for name in MEASURES),
        *(
            F.kll_merge_agg_double(F.when(F.col(f"{name}_n") > 0, F.col(f"{name}_sketch"))).alias(
                f"{name}_sketch"
            )
            for name in MEASURES
        ),
    )
    quantiles = (
        F.when(
            F.col(f"{name}_n") > 0, F.kll_sketch_get_quantile_double(f"{name}_sketch", F.lit(share))
        ).alias(f"{name}_{percentile}_ms")
        for name in MEASURES
        for percentile, share in SHARES.items()
    )
    return merged.select("day", *KEYS, *COUNTS, *quantiles)


def service(state: DataFrame) -> DataFrame:
    """Return (sub_key, served_ms, serviced_us) of each subscription that was ever served.

    `served_ms`: publish time of the newest message with a first attempt; null if it is pulled.
    `serviced_us`: its last attempt, lease or hand-over.
    """
    return (
        state.where("serviced_us is not null and sub_key is not null")
        .groupBy("sub_key")
        .agg(F.max("served_ms").alias("served_ms"), F.max("serviced_us").alias("serviced_us"))
    )


def name_keys(state: DataFrame) -> DataFrame:
    """Return (what, key, name): texts by key. Room ids need none."""
    columns = {
        "subscription": ("sub_key", "subscription_id"),
        "type": ("type_key", "event_type"),
        "host": ("host_key", "target_host"),
    }
    texts = F.array(
        *(
            F.struct(F.lit(what).alias("what"), F.col(key).alias("key"), F.col(text).alias("name"))
            for what, (key, text) in columns.items()
        )
    )
    return (
        state.select(F.explode(texts).alias("one"))
        .select("one.*")
        .where("key is not null")
        .distinct()
    )
