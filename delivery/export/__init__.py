"""The export of the delivery log: sealed Parquet segments, each row once.

    delivery_log ──plan──► COPY … TO STDOUT ──► segments (Arrow) ──► dt=…/hr=…/SYSTEM-FIRST-END.parquet ──► seal

| dies | what is there | what becomes of it |
| --- | --- | --- |
| before the plan is committed | nothing | the next one plans the same rows, and more |
| after the plan, or between two segments | some segments, under the plan's name | the plan is read again: same rows, same names, written over |
| in the middle of a segment | a file that begins with `_` | readers pass it over; the plan that is read again removes it |
| after the last segment, before the seal | every segment | written over by the same rows |
| after the seal | every segment | done |

Two exports at once are kept apart by a session lock in PostgreSQL; one that lost its session can no longer seal, and what
it still writes is what its successor writes. Needs the extra `spark` for Arrow alone, no Java.
"""
