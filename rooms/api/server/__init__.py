"""Serve HTTP/1.1 with bounds on each request, each connection, and all connections together.

`head` and `framing` read requests, bounded before they are parsed. `connections` bounds the number
of connections and their waits. `responses` has the answers of the protocol itself.
`uvicorn_internals` says what is assumed of uvicorn; `fast_protocol` (HTTP), `websocket` and
`uvicorn_server` build on it.
"""
