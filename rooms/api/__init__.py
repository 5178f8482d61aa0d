"""Serve the REST API: Litestar routes over the services, one module a resource.

    app.py          every route, and the OpenAPI document, which comes from their declarations
    fast_routes.py  the hot routes (publish, pull, ack), answered ahead of Litestar
    auth.py         authentication and scopes
    codec.py        JSON bodies: strict, every problem named by its field
    params.py       path and query parameters
    pagination.py   pages of lists
    errors.py       the table from errors to problem details (RFC 9457)
    server/         HTTP/1.1 with bounds, on uvicorn

| what goes wrong | answer |
| --- | --- |
| the body is not JSON, or is nested too deeply | 400 |
| there is no key, or it is unknown or revoked | 401 |
| the key lacks the scope | 403 |
| it does not exist, belongs to another organisation, or is being deleted | 404 |
| it is not in a state for this | 409 |
| the body exceeds the limit | 413 |
| the body is not JSON, and has a Content-Encoding | 415 |
| a field or query parameter is wrong, unknown or missing | 422, each named |
| the key makes more requests than it may | 429 |
| PostgreSQL does not answer or is full | 503, Retry-After |
"""
