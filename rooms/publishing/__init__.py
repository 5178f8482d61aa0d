"""Publish messages: one transaction writes a message, its deliveries, their work and their log.

    request.py          decode the body strictly; the payload stays the bytes that came
    routing.py          the routing table of a room: who gets an event type and version
    event_route.py      the recipients of a type and version, and what is built from them
    routing_cache.py    cache the tables of rooms, within a bound on memory
    json_schema.py      validate payloads; schema_bounds.py and regex_bounds.py bound the cost
    cel_filter.py       evaluate filters; cel_bounds.py bounds the cost
    deferred_checks.py  run checks that are too costly for the event loop in sandbox/
    inline_checks.py    run the cheap checks at once, within a budget
    prepare.py          route, check and build the rows and the answer
    group_commit.py     commit requests that arrive together in one statement
    commit_outcomes.py  how a commit ends for a request, and for those that waited for it
    pending_requests.py which requests may wait, and which wait for one with the same key or id
    publisher.py        connect the steps, for a message and for a batch
    service.py          assemble everything over one database
    backpressure.py     remember which endpoints are saturated

    body ─► request ─► route ─► prepare ─► group ─► one statement ─► 202 ─► notifications
                         ▲                              │
                         └───── the route is stale ─────┘

| failure | result |
| --- | --- |
| the routing table is older than the room | nothing is written; routed again, 503 after 3 rounds |
| the room does not exist, or is being deleted | 404 |
| the Idempotency-Key is taken | the first answer again, or 409 if the body differs |
| a caller id is taken | the first answer again, or 409 if the content differs |
| one request of a group is refused | its group is retried one by one, and only that request fails |
| PostgreSQL refuses to write (disk, partition, locks) | nothing is written, 503 |
| the connection breaks during the statement | in doubt: 503; the key makes a retry safe |
| the client disconnects | a submitted request is committed all the same |
| the process dies | what was committed is stored, and nothing else was answered with 202 |
| a notification is lost | workers poll every second |
"""
