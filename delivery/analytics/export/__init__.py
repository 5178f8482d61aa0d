"""Export the delivery log as sealed Parquet segments, each row once.

    delivery_log ──plan──► COPY … TO STDOUT ──► Arrow ──► dt=…/hr=…/SYSTEM-FIRST-END.parquet
                                                                             └──► seal

| crash | left behind | recovery |
| --- | --- | --- |
| before the plan is committed | nothing | the next run plans these rows again |
| after the plan, or between segments | some segments | the next run overwrites them |
| in the middle of a segment | a file named `_…` | readers skip it; the next run removes it |
| after the last segment, before the seal | every segment | overwritten with the same rows |
| after the seal | every segment | none needed |

A PostgreSQL session lock keeps two exports apart. An export that lost its session cannot seal, and
the segments that it still writes are those that its successor writes. The package needs Arrow from
the extra `spark`, and no Java.
"""
