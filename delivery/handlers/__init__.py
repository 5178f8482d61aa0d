"""Handler queues: messages for functions in Python processes (rows B1 to B10).

    main magazine ── fired ──► handler ── True ────────────────────────────► deleted
         ▲                        ├────── False, exception, no answer in time ► loaded into the sideline, then deleted
         │                        └────── ignorable exception ────────────────► deleted
         └──────────── shovel (every `interval_s`, or once) ◄── sideline magazine

| a process dies | what is left, and who puts it right |
| --- | --- |
| with a message in a handler | handed out and never finished: the sweeper sidelines it (`stuck`) |
| between a load and its delete | it stands in both: handled at least once, once more than needed |
| a shovel's | the sideline's entry is handed out and never finished: the sweeper puts it back there |
| between row and magazines of a new queue | no queue: its creation was never answered; what is left is cleaned up |

    from delivery.handlers import Handlers, Message

    handlers = Handlers()

    @handlers.on("orders", ignorable=(KeyError,))
    def order(message: Message) -> bool:
        return book(message.payload["amount"])

`rooms handlers shop:handlers` serves them. What is put into a handler queue has no delivery row: it is as durable as the
magazines' store.
"""

from delivery.handlers.registry import Handlers, Message

__all__ = ["Handlers", "Message"]
