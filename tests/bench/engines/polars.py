"""`python -m tests.bench.engines.polars SEGMENTS`: the core of the analysis in Polars."""

# ruff: noqa: T201 what a bench measures is printed

import sys

import polars as pl


def main() -> None:
    events = pl.scan_parquet(f"{sys.argv[1]}/*/*/*.parquet", hive_partitioning=False)
    kind = pl.col("kind")
    attempted, failed = kind == "attempted", pl.col("error_class").is_not_null()
    journeys = (
        events.filter(pl.col("delivery_hi").is_not_null())
        .group_by("delivery_hi", "delivery_lo")
        .agg(
            pl.len(),
            attempted.sum().alias("attempts"),
            (attempted & ~failed).sum().alias("successes"),
            pl.col("ts").filter(kind == "enqueued").min().alias("enqueued"),
            pl.col("ts").max().alias("last"),
            pl.col("generation").max(),
            kind.is_in(["delivered", "pull_acked", "handed_over"]).any().alias("delivered"),
            (kind == "sidelined").any().alias("sidelined"),
            pl.col("delay_ms").sum(),
        )
    )
    messages = (
        events.filter(kind.is_in(["published", "enqueued"]))
        .group_by("message_hi", "message_lo")
        .agg(pl.col("fanout").max(), (kind == "enqueued").sum().alias("enqueued"))
        .filter(pl.col("fanout") > pl.col("enqueued"))
    )
    hours = (
        events.filter(attempted)
        .group_by(
            pl.col("ts").dt.truncate("1h"),
            "room_id",
            "subscription_id",
            "event_type",
            "target_host",
        )
        .agg(
            pl.len(),
            failed.sum().alias("failures"),
            *(pl.col("latency_ms").quantile(q).alias(f"p{q}") for q in (0.5, 0.95, 0.99)),
        )
    )
    bad = (
        events.filter(attempted)
        .group_by(pl.col("ts").dt.truncate("1m").alias("minute"), "subscription_id")
        .agg(pl.len().alias("n"), failed.sum().alias("f"))
        .filter((pl.col("f") >= 2) & (pl.col("f") >= 0.5 * pl.col("n")))
    )
    pairs = (
        bad.join(bad, on="minute")
        .group_by("subscription_id", "subscription_id_right")
        .agg(pl.len())
    )
    for frame in (journeys, messages, hours, pairs):
        print(frame.collect(engine="streaming").height)


if __name__ == "__main__":
    main()
