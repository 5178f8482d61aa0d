"""Run the analysis once, whichever engine computes: segments, state, tables, `latest.json`.

`engine.Engine` is the port. Its adapters are `delivery.analytics.spark` for logs of any size, and
`delivery.analytics.local` for small ones, in this process and without Java.
"""
