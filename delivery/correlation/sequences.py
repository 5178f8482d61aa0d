"""Gaps of the log itself: numbers that a writer gave out and that are not there.

Every writer counts its rows from 1. What is there is kept as 64-bit words, one for 64 numbers, so that partitions merge by
OR and a log of millions of rows is checked in a few thousand.
"""

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812


def words(rows: DataFrame) -> DataFrame:
    """(part, writer_id, word, bits, rows): which of the numbers 64·word … 64·word + 63 came, and how many rows they were."""
    bit = F.expr("shiftleft(1L, cast(writer_seq & 63 as int))")
    return rows.groupBy("part", "writer_id", F.shiftright("writer_seq", 6).alias("word")).agg(
        F.bit_or(bit).alias("bits"), F.count(F.lit(1)).alias("rows")
    )


def doubled(words_of_parts: DataFrame) -> dict[int, int]:
    """The partitions in which some row comes more than once, with how many rows are too many."""
    more = (F.col("rows") - F.bit_count("bits")).alias("more")
    found = words_of_parts.select("part", more).where("more > 0").groupBy("part").agg(F.sum("more").alias("more"))
    return {row["part"]: row["more"] for row in sorted(found.collect())}


def gaps(words_of_parts: DataFrame) -> DataFrame:
    """(writer_id, first_seq, last_seq, missing, before): the ranges of numbers that nobody has seen.

    `before`: the log does not reach back to the writer's first row, which is no loss where the log was cut. What a writer
    wrote after the last row that is there cannot be known.
    """
    whole = words_of_parts.groupBy("writer_id", "word").agg(F.bit_or("bits").alias("bits"))
    by_word = Window.partitionBy("writer_id").orderBy("word")
    marked = whole.select(
        "writer_id",
        "word",
        "bits",
        F.lag("word", 1, -1).over(by_word).alias("before_word"),
        F.lead("word").over(by_word).isNull().alias("last"),
    )
    # In a writer's last word the numbers above its greatest are not missing: they were never given.
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
                        place -> shiftright(bits, place) & 1 = 0 and (not last or shiftrightunsigned(bits, place) <> 0)
                    ),
                    place -> named_struct('first', word * 64 + place, 'until', word * 64 + place)
                )
            ))"""
        ),
    )
    ranges = found.where("until > 0")
    # Numbers begin at 1: 0 is nobody's.
    ranges = ranges.withColumn("first", F.greatest("first", F.lit(1)))
    by_first = Window.partitionBy("writer_id").orderBy("first")
    begins = (F.col("first") > F.lag("until", 1, -1).over(by_first) + 1).cast("int")
    islands = ranges.withColumn("begins", begins).withColumn("island", F.sum("begins").over(by_first))
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
