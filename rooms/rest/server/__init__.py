"""Serve HTTP/1.1 with bounds on each request, on each connection, and on all connections together.

`head` and `framing` read requests, with bounds that hold before anything is parsed; `connections` bounds how many connections
there are and how long each may wait; `refusals` are the answers that the protocol itself gives. None of these knows uvicorn.
What stands on uvicorn's internals is in `rooms.rest.express` (HTTP), `websocket` (WebSockets) and `uvicorn_server`.
"""
