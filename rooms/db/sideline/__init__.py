"""Store sidelined deliveries (the dead-letter queue of a subscription) and take them out again.

A sidelined delivery is a row of `deliveries` in that state, a row of `sidelined`, and an entry in
the subscription's magazine. PostgreSQL decides; the magazine is a copy that can be rebuilt.

    entries    sidelined, subscriptions     which entries to load, where the others are
    queries    sidelined, deliveries        lists, counts and previews for the API
    shovel     sidelined, outbox            shovel (queue again) and purge (end)

    sidelined row without slot ──load──► with slot ──shovel──► outbox
                ▲                            ├──────purge───► no row, state `purged`
                └────entry lost, reloaded────┘

If a process dies here:

    after loading an entry,     it is loaded again; the audit finds the first entry without a row
    before recording its slot   and deletes it
    after a shovel or purge,    the delivery is queued or ended; the entry is stale and is deleted
    before deleting the entry   by the sweep
    during a statement          it is rolled back, and the delivery stays sidelined
"""
