"""Analyse the delivery log with Spark: losses, failures, root causes and retry advice.

    sealed segments ──► state of each partition ──► tables ──► latest.json
    (segments)          (journeys, anchors,         (tables)
                         rollups, counts, …)

    python -m delivery.analytics.spark --segments URI --out URI [--full]

A run processes new partitions and those whose files changed, and merges the stored state of the
others. Log rows are processed only by Spark expressions. There is no Python on executors, so a
cluster needs none of this code. The driver finishes the small results (minutes, pairs, attempt
counts) with numpy.

| failure | effect |
| --- | --- |
| the job, before the books | `latest.json` and the manifest name the previous run |
| the job, in the findings | they name this run's books, beside the findings of the previous run |
| a segment that arrives late | its partition is processed again, its new paths are rebuilt |
| deleted segments | their state stays; paths that need them have `legal` null |
| duplicate rows | found by (writer_id, writer_seq); only their partition is deduplicated |
| state of another version | StateError; `--full` starts over |
"""
