"""Read what the API, the CLI, the metrics and the export show.

These queries use the connection pool or a connection of their own, never that of a hot statement.
Each is bounded by a page, by a limit of rows to count, or by a cache.

    messages, deliveries        messages, deliveries, log_entries     lists, timelines, redelivery
    throttle                    lanes, held, ordered_keys             lanes and ordering keys
    failures                    all work tables                       failing subscriptions
    stats, subscription_counts  all work tables                       what waits, and for how long
    analytics                   analysis_runs, analysis_rows          results of the analysis
    log_export, restored_log    log_entries, log_exports, log_export_writers

If a process dies here:

    during a read               nothing has changed
    during a redelivery         it is one statement: either queued and logged, or not
    during `replace_findings`   the findings of the earlier run stay
    during an export            the range is not sealed; the next exporter reads it again and
                                writes the same rows under the same names
"""
