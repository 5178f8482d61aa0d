"""Define the handlers of the handler-queue benchmark: one message in ten is rejected and sidelined."""

from delivery.handlers import Handlers, Message

handlers = Handlers()


@handlers.on("bench")
async def handle(message: Message) -> bool:
    """As quick as a handler can be."""
    return bool(message.payload["n"] % 10)
