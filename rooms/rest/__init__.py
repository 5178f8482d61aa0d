"""The API: Litestar routes over the services, one module a resource, problems by RFC 9457.

    front.py        the hot routes (publish, pull, ack), answered ahead of Litestar by the same functions
    app.py          every route, declared once; the OpenAPI document comes from these declarations
    auth.py         who asks, and whether they may
    bodies.py       JSON bodies: strict, every problem named by field
    problems.py     the one table from errors to answers

| what goes wrong | answer |
| --- | --- |
| no JSON, or none that may be nested so deep | 400 |
| no key, unknown key, revoked key | 401 |
| the key lacks the scope | 403 |
| no such thing, no such id, another organisation's, being deleted | 404 |
| the thing is not in a state for this | 409 |
| the body is beyond the limit | 413 |
| a field or query parameter is wrong, unknown or missing | 422, each named |
| more requests than the key may make | 429 |
| PostgreSQL away or taking no more | 503, Retry-After |
"""
