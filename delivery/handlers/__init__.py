"""Serve handler queues: messages for functions in Python processes.

    main magazine ── fired ──► handler ── True ───────────────────────► deleted
         ▲                        ├────── False, exception, timeout ──► sidelined, then deleted
         │                        └────── ignorable exception ────────► deleted
         └──────────── shovel (every `interval_s`, or once) ◄── sideline magazine

| a process dies | effect |
| --- | --- |
| with a message in a handler | the message is stuck: the sweeper sidelines it (`stuck`) |
| between a load and its delete | the message is in both magazines and is handled twice |
| with entries of a shovel | the sideline's entries are stuck: the sweeper reloads them there |
| between row and magazines of a new queue | no queue; a maintenance task removes the rest |

    from delivery.handlers import Handlers, Message

    handlers = Handlers()

    @handlers.on("orders", ignorable=(KeyError,))
    def order(message: Message) -> bool:
        return book(message.payload["amount"])

`rooms handlers shop:handlers` serves them. A message of a handler queue has no delivery row: it is
as durable as the magazines' store.
"""

from delivery.handlers.api import Handlers, Message

__all__ = ["Handlers", "Message"]
