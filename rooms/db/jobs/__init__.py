"""Store jobs, and the statements by which jobs change rows, such as replay and restore.

A job is a row of `jobs`. The API adds it; a periodic task of the process that has the partition
runs it in small steps. One statement makes a step, records the job's position and adds to its
counts. It changes nothing if the job is no longer at the position that it was read with.

    queued ──► running ──► done
      │           ├──────► failed
      └───────────┴──────► cancelled

    jobs       jobs                                   states, positions, counts
    replay     messages, deliveries, outbox           past messages for one subscription
    restore    deliveries and all work tables         restore deliveries, or clear a room
    retries    deliveries, outbox                     make waiting retries due now
    delete     all tables with rows of a room         what a deletion has left

If a process dies here:

    between two steps           its successor continues at the recorded position
    during a step               PostgreSQL rolls the step back, and it is repeated
    in doubt about a commit     the position says whether the step was made
    unnoticed, still running    its next step finds another position and changes nothing
"""
