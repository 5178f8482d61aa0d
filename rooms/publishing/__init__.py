"""Publishing: from a request to one transaction that holds the message, its deliveries, their work and their log.

    request.py      the body, decoded strictly; the payload stays the bytes that came
    planner.py      the plans of rooms, cached: plan.py says which subscriptions get a type and version, schemas.py what fits
    draft.py        the rows and the answer
    committer.py    group commit: what arrives while a commit is under way shares the next one
    publisher.py    all of it, as the two calls that the routes make

    body ─► request ─► plan ─► draft ─► group ─► ONE statement ─► 202 ─► wake-ups
                        ▲                          │
                        └───── plan is stale ──────┘

| what fails | what follows |
| --- | --- |
| the plan is older than the room | the statement writes nothing and says so; planned again, 503 after 3 rounds |
| the room is gone or going | 404 |
| the Idempotency-Key is taken | the first answer again, or 409 where the body is another |
| an id of the publisher's own is taken | the first answer again, or 409 where the content is another; the rest of a batch is published |
| one request of a group is refused | the group is tried one by one; only that one fails |
| PostgreSQL takes no more (disk, partition, locks) | nothing is written, 503 |
| the connection breaks in mid-statement | in doubt: 503, never a 202; the key makes the repetition safe |
| the client goes away | what was handed to the committer is committed all the same |
| the process dies | what was committed is there; what was not was never answered |
| a wake-up is lost | workers poll every second |
"""
