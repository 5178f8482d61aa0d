"""Send webhook requests by HTTP/1.1, to vetted addresses only.

A request goes through the files in this order:

    client          `HttpSender.send`: one request and its response, within one deadline
    ssrf            resolves the host and refuses addresses that are not public or allowed
    dns             lookups by c-ares or libc, bounded, and a cache of their results
    pool            idle connections, and a slot for each open one
    bulkhead        limits of slots per organisation and endpoint, with fair turns for waiters
    connection      one HTTP/1.1 exchange at a time; counts every byte of a response

`signing` computes the signatures, which `delivery.push.endpoints` puts into the headers.
`ssrf.TargetPolicy` holds the operator's settings for addresses, ports and resolvers.

| failure | result |
| --- | --- |
| the host has no address, or no lookup answers | `dns` |
| all its addresses are refused, or the port is | `blocked` |
| no connection to any of three addresses | `connect`, or `timeout` |
| the TLS handshake fails | `tls` |
| a kept one closes before any byte of the response, within a second | sent again, once |
| a connection closes before the response is complete | `closed` |
| no slot, connection or response before the deadline | `timeout`, with the stage in the text |
| the response is not HTTP | `protocol` |
| the response's head exceeds its limit | `too_large` |
| the body exceeds its limit | its status counts; the connection is closed |
| a redirect | `redirect`: redirects are not followed |
| any other status than 2xx | `status`, with `Retry-After` |
"""
