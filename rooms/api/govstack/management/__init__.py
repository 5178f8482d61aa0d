"""Serve the management resources of GovStack's first implementation, below `/rooms/{memberId}`.

Each route calls the handler of `/v1` for the same resource, and has its bodies: only the path and
the statuses of wrong fields differ. A publisher is a grant to publish.
"""
