"""Move deliveries between states: claims, outcomes, holds, ordering, expiry, the relay.

A state and its work row change in one statement, together with the log. So every snapshot sees
them agree, and `integrity` repairs what was changed by other means.

    claims            PostgreSQL as broker: a worker claims PUSH work in `outbox`
    broker_claims     another broker: a worker claims the row of a copy that it received
    outcomes          what became of attempts: delivered, retried, held, sidelined, dropped
    holds             `held`: released by capacity, drain or probe
    ordering          `ordered_keys`, `ordered_waiting`: one delivery of a key at a time
    relay, resend     rows to send to another broker, and to send again after it lost them
    lookahead         scheduled rows that come due within the look-ahead
    broker_change     rows that the former broker mode left
    endpoints, throttle     what a worker loads of a subscription, and `lanes`, which workers share
    expire, withdraw        the end of deliveries by time or by request
    refusals                what a guest's subscription may not be sent again
    orphans, integrity      deliveries whose parts do not fit, and work rows that do not match

If a process dies here:

    worker with a claim       its session lock is gone, so other workers claim the row at once; the
                              claim is counted in `abandoned`
    worker, attempt made,     the attempt is made again by another worker: deliveries are made at
    no outcome                least once
    relay, sent but not       the row is sent again; the worker settles the second copy without an
    marked                    attempt
    any statement             it is rolled back as a whole
"""
