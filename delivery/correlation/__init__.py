"""The analysis of the delivery log, on Spark: was anything lost, what fails, with what else, since when, why, and how
should retries be set.

    sealed segments ──► state, a partition at a time ──► tables ──► latest.json
    (columns)           (words, deliveries, anchors,     (tables)
                         rollups, cells, …)

    python -m delivery.correlation --segments URI --out URI [--full]

New partitions, and those that got another file, are worked on; the state of the others is merged. Everything that touches
rows of the log runs in Spark's own expressions: no Python on executors, so that a cluster needs nothing of ours. What is
left in the end (minutes, pairs, hazards) is small and is worked out with numpy where the job was started.

| what fails | what happens |
| --- | --- |
| the job, at any place | `latest.json` and the manifest name the run before; the next run writes over what was left |
| a segment that comes late | its partition is worked on again, and paths that got rows are walked anew |
| segments that were deleted | their state stays; paths that need them are told as not known (`legal` null) |
| rows that came twice | are found by (writer_id, writer_seq), and only their partition pays for it |
| state of another version | StateError; `--full` starts over |
"""
