"""Lease deliveries to PULL consumers: acquire, acknowledge, release, extend, scan.

A lease is what other systems call a visibility timeout or an acknowledgement deadline. Every
statement checks the owner and the state of the subscription, so a revoked access takes effect at
once. Many requests share one statement.

    outbox (due) ──acquire──► leases ──ack──► delivered
        ▲                       │ ├──extend──► a later end
        └────nack, expiry───────┘ └──too many receives──► sidelined

    acquire           outbox, leases, deliveries      what is due, by priority and time
    acquire_copies    outbox, leases, deliveries      given deliveries (from a broker or a scan)
    ack, release      leases, outbox, sidelined       the ends of a lease
    scan              outbox, messages                read the queue without leasing

If a process dies here:

    before the commit           nothing is leased or settled
    after an acquire,           the lease expires, and the delivery is queued again with its
    before the answer           receive counted
    after an ack,               the delivery is delivered; repeating the request says so
    before the answer
    while leases expire         the rest expire with the next run of the maintenance task
"""
