"""Write publish requests: all rows of a group of requests in one statement, or none.

    routing         rooms, subscriptions, event_types    what a publisher must know of a room
    request_rows    (none)                               a request, packed as rows
    insert          messages, deliveries, outbox, held, log_entries, idempotency_keys,
                    message_ids, ordered_keys, ordered_waiting

The statement writes only if the plan of each room is current and no idempotency key and no
caller's id is used. Otherwise it returns the conflict, and the publisher loads the routing again
or answers from the stored request.

If a process dies here:

    before the commit           no row exists, and no client got an answer
    after the commit,           the messages are stored and delivered; a client that repeats the
    before the answer           request with its Idempotency-Key gets the stored answer
    connection lost during      the outcome is in doubt: the client gets 503, and an Idempotency-Key
    the statement               makes the repetition safe
    before the notification     workers and polls find the work within a second, by polling
"""
