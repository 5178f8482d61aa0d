"""PULL: a subscriber fetches what waits for its subscription, under a lease, and says what became of it.

    request.py      bodies, decoded strictly
    queue.py        a subscription as an organisation asks for it
    receipt.py      ack ids: a delivery and the lease it is under, as one opaque word
    chain.py, roster.py     the consumers of one queue, and who of them is told of work: decisions alone
    waiters.py      consumers that wait, a line a queue
    hands.py        the statements that take for them, one for all polls of many lines
    line.py         one such line, and what is asked and got for it
    selector.py, sifter.py, drain.py    which messages somebody wants, found and leased; copies that are over by that
    stream.py, streams.py, stream_request.py    one client's consumers under one credit, and all such clients
    browser.py      looking without taking
    source.py       where messages are leased from: the outbox, or the copies of another broker
    outbox_source.py, marks.py      PostgreSQL is the broker: what is due, and where a take begins to look
    broker_source.py, tap.py        another one is: its queues, open while polls wait; exactly its copies are leased
    strays.py       what it hands out and nobody leases
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
| this process stops | who waits gets an empty answer, streams end with `shutdown` |
| a stream's client goes away | what was taken and not sent goes back at once; what it got, when its leases end |
| it does not read | it is not interested until it does; after 60 s it is gone |
| its key is revoked, its subscription deleted | the stream ends within a second or two, and says why |

With a broker of its own kind (a copy is a hint, its work row the truth):

| what goes wrong | what follows |
| --- | --- |
| this process dies before the lease commits | its copies go back to their queue at once |
| it dies after the commit, before the copy is settled | the copy comes again, is of a step that is over, and is settled |
| paused, or deleted, while polls wait | the queue is closed on the signal; copies go back, or end with it; 404 |
| the broker is away | who waits goes on waiting; whose time is up gets 503 where something is due |
| something is due and does not come | who cannot wait waits for it a second at most |
| no queue was made yet | nothing is asked of the broker until the relay has sent something |
"""
