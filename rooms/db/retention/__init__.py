"""Delete old data: partitions of days, default partitions, jobs, exports, keys and writers.

`messages`, `deliveries` and `log_entries` are partitioned by day. A day whose deliveries have all
ended is dropped. What must stay of an older day is copied to a small partition, which then takes
the place of the day.

    partitions        create the coming days; decide which ranges are replaced
    replace           copy, swap and drop one range
    mirror_triggers   keep the copy equal to its source until the swap
    bounded_locks     short lock time-outs and retries for all of this
    cleanup           rows of the default partitions, `jobs`, `log_exports`, `idempotency_keys`,
                      `message_ids`, `writers`

If a process dies here:

    before the swap             nothing is deleted; the next run drops the copy and the triggers
    during the swap             it is one transaction: all or nothing
    after the swap              the detached partitions are recognised by their names; the next run
                                frees caller's ids and drops them
    while it holds a lock       PostgreSQL ends its session after a time-out of at most two seconds
"""
