"""Reconciliation: what was published against what became of it. Nothing is left over: every residual is 0, or a bug.

    Σ fanout + unanchored + excess = enqueued + missing
    enqueued + never_enqueued = delivered + acked + handed_over + expired + cancelled + dropped + purged + sidelined
                              + held + waiting + in_flight + lost

The first line is counted a message, the second a delivery, from different rows of the log.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from delivery.correlation.conformance import CODES
from delivery.correlation.journeys import OUTCOMES
from rooms.domain.states import LogKind

_HOUR_US = 3_600_000_000


def anchors(rows: DataFrame) -> DataFrame:
    """A partition's messages: those whose rows agree as one sum a room (message_hi null), every other one by itself.

    `anchored`: rows that say how many deliveries there should be; `fanout`: how many they say; `enqueued`: how many rows
    of deliveries there are.
    """
    anchor = F.col("code").isin(CODES[LogKind.PUBLISHED], CODES[LogKind.REPLAYED]) & F.col("fanout").isNotNull()
    born = F.col("code").isin(CODES[LogKind.ENQUEUED], CODES[LogKind.REPLAYED])
    by_message = (
        rows.where(anchor | born)
        .groupBy("part", "room_id", "message_hi", "message_lo")
        .agg(
            F.count(F.when(anchor, 1)).alias("anchored"),
            F.sum(F.when(anchor, F.col("fanout")).otherwise(0)).alias("fanout"),
            F.count(F.when(born, 1)).alias("enqueued"),
        )
    )
    agrees = (F.col("anchored") > 0) & (F.col("fanout") == F.col("enqueued"))
    return by_message.groupBy(
        "part",
        "room_id",
        F.when(~agrees, F.col("message_hi")).alias("message_hi"),
        F.when(~agrees, F.col("message_lo")).alias("message_lo"),
    ).agg(
        F.count(F.lit(1)).alias("messages"),
        F.sum("anchored").alias("anchored"),
        F.sum("fanout").alias("fanout"),
        F.sum("enqueued").alias("enqueued"),
    )


def _odd(anchors_of_parts: DataFrame) -> DataFrame:
    """Messages whose rows do not agree within a partition, over all partitions."""
    return (
        anchors_of_parts.where("message_hi is not null")
        .groupBy("room_id", "message_hi", "message_lo")
        .agg(
            F.min("part").alias("part"),
            F.sum("anchored").alias("anchored"),
            F.sum("fanout").alias("fanout"),
            F.sum("enqueued").alias("enqueued"),
        )
    )


def missing(anchors_of_parts: DataFrame) -> DataFrame:
    """(room_id, message_hi, message_lo, fanout, enqueued, missing): messages that lack a delivery they should have."""
    lacking = _odd(anchors_of_parts).where("anchored > 0 and fanout > enqueued")
    return lacking.select(
        "room_id",
        "message_hi",
        "message_lo",
        "fanout",
        "enqueued",
        (F.col("fanout") - F.col("enqueued")).alias("missing"),
    )


def reconcile(anchors_of_parts: DataFrame, journeys: DataFrame) -> DataFrame:
    """One row a room and hour of publish: both lines of the books and what is left over of each."""
    gap = F.col("fanout") - F.col("enqueued")
    anchored = F.col("anchored") > 0
    odd = _odd(anchors_of_parts).select(
        "part",
        "room_id",
        F.lit(1).cast("bigint").alias("messages"),
        "fanout",
        F.when(anchored, F.greatest(gap, F.lit(0))).otherwise(0).alias("missing"),
        F.when(anchored, F.greatest(-gap, F.lit(0))).otherwise(0).alias("excess"),
        F.when(anchored, 0).otherwise(F.col("enqueued")).alias("unanchored"),
    )
    zero = F.lit(0).cast("bigint")
    even = anchors_of_parts.where("message_hi is null").select(
        "part", "room_id", "messages", "fanout", zero.alias("missing"), zero.alias("excess"), zero.alias("unanchored")
    )
    books = (
        even.unionByName(odd)
        .groupBy(F.col("part").alias("hour"), "room_id")
        .agg(*(F.sum(name).alias(name) for name in ("messages", "fanout", "missing", "excess", "unanchored")))
    )
    hour = F.floor(F.coalesce("enqueued_us", "first_us") / F.lit(_HOUR_US)).cast("int").alias("hour")
    born = F.col("enqueued") > 0
    stands = journeys.groupBy(hour, "room_id").agg(
        F.sum("enqueued").alias("enqueued"),
        F.sum(F.when(born, 0).otherwise(1)).alias("never_enqueued"),
        F.sum(F.greatest(F.col("enqueued") - 1, F.lit(0))).alias("enqueued_twice"),
        F.sum(F.greatest(F.col("successes") - 1, F.lit(0))).alias("duplicates"),
        *(F.count(F.when(F.col("outcome") == outcome, 1)).alias(outcome) for outcome in OUTCOMES),
    )
    both = books.join(stands, ["hour", "room_id"], "full_outer").na.fill(0)
    counted = sum((F.col(outcome) for outcome in OUTCOMES), F.lit(0))
    return both.select(
        F.timestamp_seconds(F.col("hour").cast("bigint") * 3600).alias("hour"),
        "room_id",
        "messages",
        "fanout",
        "missing",
        "excess",
        "unanchored",
        "enqueued",
        "never_enqueued",
        "enqueued_twice",
        *OUTCOMES,
        "duplicates",
        (F.col("fanout") + F.col("excess") + F.col("unanchored") - F.col("missing") - F.col("enqueued")).alias(
            "residual_fanout"
        ),
        (F.col("enqueued") + F.col("never_enqueued") - F.col("enqueued_twice") - counted).alias("residual_outcome"),
    )
