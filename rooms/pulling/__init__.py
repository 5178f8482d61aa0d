"""PULL: a subscriber fetches what waits for its subscription, under a lease, and says what became of it.

    request.py      bodies, decoded strictly
    queue.py        a subscription as an organisation asks for it
    receipt.py      ack ids: a delivery and the lease it is under, as one opaque word
    waiters.py      polls that wait, a line a subscription; one statement takes for all polls of many lines
    marks.py        where a take from a queue with much in it begins to look
    settler.py      acks that arrive together end in one statement
    outcomes.py     what consumers say of their leases, and what they are told of each
    answer.py       messages and results as JSON; a payload is the bytes that were published
    puller.py       all of it, as the calls that the routes make
    service.py      put together over one database

    queued ──pull──► leased ──ack──► delivered
      ▲                │ │
      │                │ └─ its message expires ──► expired
      └─ nack (after delay_ms), lease over (within 1 s) ── or sidelined, where max_receives is spent

A lease belongs to one generation of its delivery. Whatever ends it but an ack raises the generation, so that an ack id
of an earlier lease is late for ever. A lease lasts no longer than its message.

| what goes wrong | what follows |
| --- | --- |
| the consumer dies, or never answers | the lease ends, upkeep queues the delivery again, one receive spent |
| it answers after the lease's time | `late`, nothing changes; 409 where that is so of every id |
| ack and the lease's end meet | the row's lock decides; the other one finds another generation |
| an ack's answer is lost, the ack repeated | `acked` again: the delivery ended under that very lease |
| an ack id of another subscription, or made up | `unknown` |
| the subscription is paused | a pull gets nothing, acks go on |
| it is deleted, or another organisation's | 404 |
| the client goes away while it waits | nothing is taken for it; what was taken at that moment is given back at once |
| this process dies between take and answer | the lease ends, as above |
| PostgreSQL away | 503; an ack in doubt may be sent again |
| a wake-up is lost | one look every half second serves all who wait |
| this process stops | who waits gets an empty answer |
"""
