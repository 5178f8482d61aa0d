"""Attempt deliveries that may crash their worker in sandbox processes.

A crash does not reveal its cause: all claims of a dead worker are claimed again. A task that was
lost with several workers is attempted in the shared sandbox, a process beside the worker, together
with up to 32 such tasks. If that process dies, each of them is attempted in a sandbox that runs one
task at a time. Only a task that crashes this one several times in a row is given up.

    client    `SandboxClient`: chooses the sandbox, repeats after a crash, gives up
    process   `SandboxProcess`: starts a process when it is needed, and ends it when it is idle;
              also the frames that go through its pipes
    __main__  the process itself: reads requests from standard input, writes results to standard
    output

| failure | what follows |
| --- | --- |
| the shared sandbox dies or hangs | its tasks are attempted one at a time |
| a single sandbox dies or hangs | the task is attempted again; after three deaths it is sidelined |
| the shared sandbox cannot be started | the worker makes the attempt itself, with a warning |
| no single sandbox can be started | no attempt, as the task may have killed the shared one |
| a start takes the rest of a claim | that sandbox is not started again for a minute |
| the claim runs out before a sandbox is free | no attempt; the task is claimed again |
| the claim runs out after a sandbox died | the next claim goes on from there, in the same worker |
| the worker dies | its sandboxes end with their standard input; nothing is proven against a task |
"""
