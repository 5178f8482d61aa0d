"""Serve GovStack's two interfaces for publishing and subscribing, over the services of `/v1`.

`/r1/{instanceId}/{memberClass}/{memberCode}/{applicationCode}/…` is the interface of its
specification, `/rooms/{memberId}/{roomId}/…` that of its first implementation. Both translate: the
functions that they call are those of `/v1`, with the same principal, grants, quotas and journal.

The path names a room by its owner's member id and its name. A room that is not there has the id 0,
which no room has. So every check runs as for a hidden room, and gives the same answer.

Modules: `callers` (who calls, and which room), `bodies` (schemas), `errors` (problems with the
statuses of the specification), `operations` and `document` (the OpenAPI documents), one module for
each resource, and `app` (the routers).
"""
