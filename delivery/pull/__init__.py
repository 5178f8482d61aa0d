"""Serve PULL: a subscriber leases messages of its subscription, and acks or nacks them.

    requests.py         request bodies, stream queries, frames and ack ids, decoded strictly
    responses.py        messages and results as JSON; a payload is the bytes that were published
    target.py           the queue that a request is for, and message selectors
    service.py          all of it, as the calls that the routes make
    consumer_limit.py   how many consumers of an organisation may wait
    waiters.py          consumers that wait, in one wait queue per key
    wait_queue.py       one wait queue, and what is requested and leased for it
    name_group.py       priorities of the wait queues of one subscription
    dispatch.py         which consumer of a queue is notified of work: pure decisions
    lease_batcher.py    lease statements, each for the polls of many wait queues
    postgres_source.py  leases from the outbox, if PostgreSQL is the broker
    broker_source.py    leases of copies that an external broker hands out
    broker_consumer.py  one of its queues, open while polls wait
    open_queues.py      how many of them are open
    selective.py        leases by selector, and outdated copies that they leave in a broker
    leases.py           ack, nack and extend; acks that arrive together share a statement
    stream.py           one client's consumers under one credit, and reading without leases
    streams.py          all streams of a process

    queued ──pull──► leased ──ack──► delivered
      ▲                │
      └────────────────┴─ nack (after delay_ms), lease ended (within 1 s)
                          or sidelined, if max_receives is spent; or expired, if its message is;
                          released, without a receive, if no consumer was given the message

A lease belongs to one generation of its delivery. Every end of a lease but an ack raises the
generation, so the ack id of an earlier lease is late for ever. Expiry ends what waits: a lease runs
to its end, and is acknowledged until then.

| failure | consequence |
| --- | --- |
| the consumer dies or never answers | the lease ends, the delivery is queued again |
| it answers after the lease ended | `late`, no change; 409 if every id is late |
| an ack meets the lease's end | the row lock decides; the other finds a later generation |
| an ack's answer is lost, the ack is repeated | `acked` again: it ended under that lease |
| an ack id is another subscription's, or invalid | `unknown` |
| the subscription is paused | a pull gets nothing, acks are accepted |
| it is deleted, or another organisation's | 404 |
| the client disconnects while it waits | what was just leased for it is returned at once |
| this process dies between lease and answer | the lease ends, as above |
| PostgreSQL is unavailable | 503; an ack in doubt may be sent again |
| a notification is lost | a poll every half second serves all waiting consumers |
| this process stops | waiting polls get an empty answer, streams end with `shutdown` |
| a stream's client disconnects | unsent messages return at once, sent ones when leases end |
| it does not read | it is not interested until it does; after 60 s it is disconnected |
| half of a lease is over before | what was not sent returns at once, uncounted; others get it |
| its key is revoked, its subscription deleted | the stream ends within 5 s and says why |

With an external broker a copy is a hint, and its outbox row is the truth:

| failure | consequence |
| --- | --- |
| this process dies before the lease commits | its copies go back to their queue at once |
| it dies between the commit and the settle | the copy comes again, outdated, and is settled |
| paused or deleted while polls wait | the queue is closed on the notification; 404 if deleted |
| the broker is unavailable | polls wait; when their time is up, 503 if something is due |
| something is due and does not come | polls that cannot wait stay for a second at most |
| no queue was created yet | the broker is asked only after the relay has sent something |
"""
