"""Attempt deliveries at webhook endpoints.

A push worker claims due tasks, calls webhooks and commits outcomes. A task goes through the files
in this order:

    broker_intake     with an external broker only: claims its messages in PostgreSQL
    worker            consumes batches and dispatches each task to the lane of its subscription
    endpoints         the subscription's URL, headers and secrets, cached
    lanes             finds that lane, or makes it, and removes those without work
    lane              one subscription's queue; `concurrency` and `rate_limit` bound its attempts
    unsent            holds, cancels or releases tasks that get no attempt now
    slots             takes the lane's tasks one by one, and passes on what each attempt returns
    attempt           signs a request and sends it by `http`, or by `sandbox` after crashes
    retry             what follows from a failure: retry, sideline, drop or expire
    endpoint_state    what the result shows about the endpoint, counted by `circuit` and kept by
                      `failure_cache` until it is recorded
    outcome_writer    commits outcomes in batches; then the task is settled

Beside this path, `task_source` is the port by which tasks come, `release_held` queues held
deliveries again, `test_call` calls a webhook on request of a user, and `process` builds a worker
from the settings.

| failure | what follows |
| --- | --- |
| the endpoint fails | a retry after the backoff, then the sideline; the lane makes fewer attempts |
| the endpoint fails many times in a row | its circuit opens: tasks are held, and probes are sent |
| the endpoint hangs | its lane is saturated: tasks are held, and other lanes are not delayed |
| more waits than the rate lets start | the rest is held; other lanes are not delayed |
| the worker dies | its claims end within 2 s; attempts in progress may be made again |
| an attempt crashes its worker | after three crashes it is made in a sandbox process |
| PostgreSQL is unavailable | outcomes wait; attempts end, and no new tasks are claimed |
| PostgreSQL refuses a claim, or a look for the next | it is tried again; attempts go on |
| a commit of outcomes takes more than 5 s | they wait; what is claimed is returned |
| PostgreSQL never accepts an outcome | its task is attempted again when the claim ends |
| the broker is unavailable | attempts go on; waiting tasks are delivered again |
| settings change | lanes get them by notification, or with the next task's version |
| the endpoint's settings are not valid | tasks are held; the subscription has the reason |
"""
