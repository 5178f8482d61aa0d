"""Judge open deliveries, reconcile messages with the outcomes of deliveries, find gaps in the log.

An open delivery waits, is stuck, is lost, or is unknown for want of segments.

Every residual must be 0:

    Σ fanout + unanchored + excess
        = enqueued - enqueued_twice + never_enqueued + missing + unread
    enqueued - enqueued_twice + never_enqueued = delivered + acked + handed_over + expired
        + cancelled + dropped + purged + sidelined + held + waiting + in_flight + stuck + unknown
        + lost

The first line counts messages, the second deliveries, from different rows of the log. A delivery
without the row that creates it is a hole of the log: it exists, so it is not missing. One with
two such rows is one delivery, and does not stand in for another one. `unread` are deliveries that
may exist in segments that were set aside.

Every writer numbers its rows from 1. The numbers seen are stored as bits of 64-bit words, so
partitions merge by OR and a log of millions of rows has a few thousand words.
"""

from datetime import datetime

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from delivery.analytics.runs.conformance import CODE_MASK, CODES
from delivery.analytics.runs.outcomes import (
    AGED,
    ATTEMPT_US,
    GRACE_US,
    LEASE_US,
    OUTCOMES,
    PENDING,
    PENDING_US,
    S_US,
    UNSERVED_US,
    UnreadHours,
)
from rooms.domain.state_machine import LogKind

_HOUR_US = 3_600_000_000


def may_have_later(unread: UnreadHours, last_us: Column) -> Column:
    """Return True if rows after this time may be among the unread ones."""
    before_us = unread.later_before_us
    if unread.anywhere or before_us is None:
        return F.lit(unread.anywhere)
    return last_us < F.lit(before_us)


def may_contain(unread: UnreadHours, part: Column) -> Column:
    """Return True if rows of this hour may be among the unread ones."""
    if unread.anywhere or not unread.parts:
        return F.lit(unread.anywhere)
    return part.isin(*sorted(unread.parts))


def log_end_us(partials: DataFrame, now: datetime) -> int:
    """Return the time of the newest row of any delivery, but not after `now`."""
    newest = partials.agg(F.max("last_us").alias("newest")).collect()[0]["newest"]
    now_us = int(now.timestamp() * S_US)
    return now_us if newest is None else min(int(newest), now_us)


def with_verdicts(
    merged: DataFrame, service: DataFrame, *, end_us: int, unread: UnreadHours
) -> DataFrame:
    """Set the outcomes `lost`, `stuck` and `unknown`.

    `service`: (sub_key, served_ms, serviced_us): the publish time of the newest message with a
    first attempt at the subscription, and its last attempt, lease or hand-over. A delivery due an
    hour before `served_ms` that still waits was passed over. A delivery without such a message
    waits, as its subscription has no consumer (paused, disabled, not pulled): in time, it is stuck.
    """
    joined = merged.join(F.broadcast(service), "sub_key", "left").withColumn(
        "since_us", _since_us()
    )
    outcome, end = F.col("outcome"), F.lit(end_us)
    kind = F.col("last_key").bitwiseAND(CODE_MASK)
    passed = F.col("due_us") + GRACE_US < F.col("served_ms") * 1000
    lost = (outcome == "waiting") & F.coalesce(passed, F.lit(False))
    idle_us = end - F.col("since_us")
    unserved_us = end - F.coalesce("serviced_us", F.lit(0))
    stuck = (
        F.when(outcome == "in_flight", idle_us > _limit(kind))
        .when(
            outcome.isin("held", "waiting"),
            (idle_us > PENDING_US) | ((idle_us > UNSERVED_US) & (unserved_us > UNSERVED_US)),
        )
        .otherwise(F.lit(False))
    )
    verdict = (
        F.when(~outcome.isin(*PENDING), outcome)
        .when(may_have_later(unread, F.col("last_us")), "unknown")
        .when(lost, "lost")
        .when(stuck, "stuck")
        .otherwise(outcome)
    )
    return joined.withColumn("outcome", verdict).drop("served_ms", "serviced_us")


def _limit(kind: Column) -> Column:
    return F.when(kind == CODES[LogKind.LEASED], LEASE_US).otherwise(ATTEMPT_US)


def _since_us() -> Column:
    """Return since when a delivery is as it is; what waits is so since it was due."""
    kind = F.col("last_key").bitwiseAND(CODE_MASK)
    others = [LogKind.LEASED, LogKind.ATTEMPTED, LogKind.HELD, LogKind.SIDELINED]
    waits = ~kind.isin([CODES[one] for one in others])
    return F.when(waits, F.coalesce("due_us", "last_us")).otherwise(F.col("last_us"))


def ages(journeys: DataFrame, *, end_us: int) -> DataFrame:
    """Return how many deliveries of each subscription are open, and the oldest of each outcome."""
    oldest = F.struct("since_us", "delivery_id")
    return (
        journeys.where(F.col("outcome").isin(*AGED))
        .groupBy("room_id", "subscription_id", "outcome")
        .agg(F.count(F.lit(1)).alias("deliveries"), F.min(oldest).alias("oldest"))
        .select(
            "room_id",
            "subscription_id",
            "outcome",
            "deliveries",
            F.timestamp_micros("oldest.since_us").alias("oldest_since"),
            (F.greatest(F.lit(end_us) - F.col("oldest.since_us"), F.lit(0)) / F.lit(1e6)).alias(
                "oldest_age_s"
            ),
            F.col("oldest.delivery_id").alias("oldest_delivery_id"),
        )
    )


def anchor_counts(rows: DataFrame) -> DataFrame:
    """Sum up messages whose rows agree by room (message_hi null); keep all others single.

    `anchored`: rows that state the number of deliveries. `fanout`: their sum. `enqueued`: rows that
    create a delivery.
    """
    anchor = (
        F.col("code").isin(CODES[LogKind.PUBLISHED], CODES[LogKind.REPLAYED])
        & F.col("fanout").isNotNull()
    )
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


def _inconsistent_messages(anchors: DataFrame) -> DataFrame:
    """Return messages whose rows disagree within a partition, over all partitions."""
    return (
        anchors.where("message_hi is not null")
        .groupBy("room_id", "message_hi", "message_lo")
        .agg(
            F.min("part").alias("part"),
            F.sum("anchored").alias("anchored"),
            F.sum("fanout").alias("fanout"),
            F.sum("enqueued").alias("enqueued"),
        )
    )


_MESSAGE = ("room_id", "message_hi", "message_lo")


def _balances(anchors: DataFrame, journeys: DataFrame, unread: UnreadHours) -> DataFrame:
    """Return one row for each message whose rows disagree, or with deliveries not created once.

    `found`: deliveries that only later rows show. `repeated`: rows that create a delivery again.
    `part`: hour of publish, or of the first row.
    """
    hour_of_first, hour_of_creation = (
        F.floor(F.col(name) / F.lit(_HOUR_US)).cast("int") for name in ("first_us", "enqueued_us")
    )
    not_created_once = (
        journeys.where("enqueued <> 1")
        .groupBy(*_MESSAGE)
        .agg(
            F.count(F.when(F.col("enqueued") == 0, 1)).alias("found"),
            F.sum(F.greatest(F.col("enqueued") - 1, F.lit(0))).alias("repeated"),
            F.min(F.when(F.col("enqueued") == 0, hour_of_first)).alias("first_part"),
            F.min(F.when(F.col("enqueued") > 1, hour_of_creation)).alias("repeated_part"),
        )
    )
    both = _inconsistent_messages(anchors).join(not_created_once, list(_MESSAGE), "full_outer")
    known = both.withColumns(
        {
            "part": F.coalesce(F.least("part", "repeated_part"), "first_part"),
            "messages": F.when(F.col("anchored").isNotNull(), 1).otherwise(0).cast("bigint"),
        }
    ).na.fill(0, ["anchored", "fanout", "enqueued", "found", "repeated"])
    # Of a message whose rows agree within an hour, only what is not created once is here: its
    # repeated rows stood in for deliveries that are missing.
    gap = F.col("fanout") - F.col("enqueued") - F.col("found") + F.col("repeated")
    anchored = F.col("anchored") > 0
    lacking = F.greatest(gap, F.lit(0))
    may_be_unread = may_contain(unread, F.col("part"))
    return known.withColumns(
        {
            "missing": F.when(may_be_unread, 0).otherwise(lacking),
            "unread": F.when(may_be_unread, lacking).otherwise(0),
            "excess": F.when(anchored, F.greatest(-gap, F.lit(0))).otherwise(0),
            "unanchored": F.when(anchored, 0).otherwise(F.greatest(-gap, F.lit(0))),
        }
    )


def missing_deliveries(anchors: DataFrame, journeys: DataFrame, unread: UnreadHours) -> DataFrame:
    """Return messages with missing deliveries, and how many are missing."""
    lacking = _balances(anchors, journeys, unread).where("missing > 0")
    # The rows of the message in all hours: those that agree within an hour are only in sums.
    exist = F.count("enqueued")
    return (
        lacking.select(*_MESSAGE, "missing")
        .join(journeys.select(*_MESSAGE, "enqueued"), list(_MESSAGE), "left")
        .groupBy(*_MESSAGE, "missing")
        .agg(
            (exist + F.col("missing")).alias("fanout"),
            F.coalesce(F.sum("enqueued"), F.lit(0)).alias("enqueued"),
            F.count(F.when(F.col("enqueued") == 0, 1)).alias("found"),
        )
    )


_BY_MESSAGE = ("messages", "fanout", "missing", "unread", "excess", "unanchored")


def reconcile(anchors: DataFrame, journeys: DataFrame, unread: UnreadHours) -> DataFrame:
    """Return one row a room and hour of publish, with the residuals of both lines."""
    odd = _balances(anchors, journeys, unread)
    zero = F.lit(0).cast("bigint")
    even = anchors.where("message_hi is null").select(
        "part",
        "room_id",
        "messages",
        "fanout",
        zero.alias("missing"),
        zero.alias("unread"),
        zero.alias("excess"),
        zero.alias("unanchored"),
    )
    by_message = (
        even.unionByName(odd.select("part", "room_id", *_BY_MESSAGE))
        .groupBy(F.col("part").alias("hour"), "room_id")
        .agg(*(F.sum(name).alias(name) for name in _BY_MESSAGE))
    )
    columns = ("hour", "room_id", "enqueued", "successes", "outcome")
    hour = F.floor(F.col("enqueued_us") / F.lit(_HOUR_US)).cast("int")
    created = journeys.where("enqueued > 0").withColumn("hour", hour).select(*columns)
    # Counted in the hour of its message, as both lines must balance in each hour.
    others = journeys.where("enqueued = 0").join(
        odd.select(*_MESSAGE, F.col("part").alias("hour")), list(_MESSAGE)
    )
    by_delivery = (
        created.unionByName(others.select(*columns))
        .groupBy("hour", "room_id")
        .agg(
            F.sum("enqueued").alias("enqueued"),
            F.sum(F.when(F.col("enqueued") > 0, 0).otherwise(1)).alias("never_enqueued"),
            F.sum(F.greatest(F.col("enqueued") - 1, F.lit(0))).alias("enqueued_twice"),
            F.sum(F.greatest(F.col("successes") - 1, F.lit(0))).alias("duplicates"),
            *(
                F.count(F.when(F.col("outcome") == outcome, 1)).alias(outcome)
                for outcome in OUTCOMES
            ),
        )
    )
    both = by_message.join(by_delivery, ["hour", "room_id"], "full_outer").na.fill(0)
    counted = sum((F.col(outcome) for outcome in OUTCOMES), F.lit(0))
    return both.select(
        F.timestamp_seconds(F.col("hour").cast("bigint") * 3600).alias("hour"),
        "room_id",
        "messages",
        "fanout",
        "missing",
        "unread",
        "excess",
        "unanchored",
        "enqueued",
        "never_enqueued",
        "enqueued_twice",
        *OUTCOMES,
        "duplicates",
        (
            F.col("fanout")
            + F.col("excess")
            + F.col("unanchored")
            - F.col("missing")
            - F.col("unread")
            - F.col("enqueued")
            + F.col("enqueued_twice")
            - F.col("never_enqueued")
        ).alias("residual_fanout"),
        (F.col("enqueued") + F.col("never_enqueued") - F.col("enqueued_twice") - counted).alias(
            "residual_outcome"
        ),
    )


def sequence_words(rows: DataFrame) -> DataFrame:
    """Return (part, writer_id, word, bits, rows): numbers 64·word … 64·word + 63 and their rows."""
    bit = F.expr("shiftleft(1L, cast(writer_seq & 63 as int))")
    return rows.groupBy("part", "writer_id", F.shiftright("writer_seq", 6).alias("word")).agg(
        F.bit_or(bit).alias("bits"), F.count(F.lit(1)).alias("rows")
    )


def duplicate_partitions(words: DataFrame) -> dict[int, int]:
    """Return the partitions with duplicate rows, and the number of duplicates."""
    more = (F.col("rows") - F.bit_count("bits")).alias("more")
    found = (
        words.select("part", more)
        .where("more > 0")
        .groupBy("part")
        .agg(F.sum("more").alias("more"))
    )
    return {row["part"]: row["more"] for row in sorted(found.collect())}


def sequence_gaps(words: DataFrame) -> DataFrame:
    """Return (writer_id, first_seq, last_seq, missing, before): ranges of missing numbers.

    `before`: the log does not reach back to the writer's first row, so the range is no loss. Rows
    after the last known row of a writer cannot be detected.
    """
    whole = words.groupBy("writer_id", "word").agg(F.bit_or("bits").alias("bits"))
    by_word = Window.partitionBy("writer_id").orderBy("word")
    marked = whole.select(
        "writer_id",
        "word",
        "bits",
        F.lag("word", 1, -1).over(by_word).alias("before_word"),
        F.lead("word").over(by_word).isNull().alias("last"),
    )
    # In a writer's last word, numbers above its highest are not missing but unused.
    found = marked.where("bits <> -1 or before_word + 1 < word").select(
        "writer_id",
        F.expr(
            """inline(concat(
                filter(
                    array(named_struct('first', (before_word + 1) * 64, 'until', word * 64 - 1)),
                    skipped -> before_word + 1 < word
                ),
                transform(
                    filter(
                        sequence(0, 63),
                        place -> shiftright(bits, place) & 1 = 0
                            and (not last or shiftrightunsigned(bits, place) <> 0)
                    ),
                    place -> named_struct('first', word * 64 + place, 'until', word * 64 + place)
                )
            ))"""
        ),
    )
    ranges = found.where("until > 0")
    # Numbers begin at 1, so 0 is never used.
    ranges = ranges.withColumn("first", F.greatest("first", F.lit(1)))
    by_first = Window.partitionBy("writer_id").orderBy("first")
    begins = (F.col("first") > F.lag("until", 1, -1).over(by_first) + 1).cast("int")
    islands = ranges.withColumn("begins", begins).withColumn(
        "island", F.sum("begins").over(by_first)
    )
    return (
        islands.groupBy("writer_id", "island")
        .agg(F.min("first").alias("first_seq"), F.max("until").alias("last_seq"))
        .select(
            "writer_id",
            "first_seq",
            "last_seq",
            (F.col("last_seq") - F.col("first_seq") + 1).alias("missing"),
            (F.col("first_seq") == 1).alias("before"),
        )
    )
