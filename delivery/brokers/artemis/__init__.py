"""Use Apache Artemis as broker: a copy of each due delivery is a message in one of its queues.

    broker.py           the adapter: queues, sending, and the connections it opens
    consumer.py         one consumer of a queue, on a connection of its own
    management.py       requests to the broker's management, by messages
    users.py            users of the broker for native subscriptions
    queue_names.py      the names of queues
    message_format.py   a copy as a STOMP message and back
    frames.py           STOMP 1.2 frames as bytes
    connection.py       a socket to a broker that answers, with TLS and login, a connection as the
                        event loop sees it, and the threads that open connections
    io_thread.py        the thread that reads and writes all connections
    wakeup.py           how other threads wake that thread

    event loop ── write ──► io_thread ──► socket
        ▲                      │
        └── one call a read ◄──┘ parse and decode

| failure | consequence |
| --- | --- |
| the broker is unavailable | BrokerUnavailableError; the caller tries again |
| the connection ends while copies are sent | those without a receipt are in doubt, and sent again |
| the broker rejects a frame | its copy is returned as rejected, the others are sent again |
| a queue does not exist | its copies are returned as rejected with `queue_missing` |
| an ACK is lost | the copy comes again, outdated, and is settled |
| a message is not a copy | it is returned as malformed, and acknowledged when it is recorded |
| a consumer's connection ends | its unacknowledged copies go back to their queue |
| heart-beats are missing | the connection is closed, as above |
| the broker restarts, or lost its data | the sentinel is missing; recovery sends the copies again |
"""
