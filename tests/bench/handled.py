"""What the bench of handler queues has handled: one message in ten is refused, and rests in the sideline."""

from delivery.handlers import Handlers, Message

handlers = Handlers()


@handlers.on("bench")
async def handle(message: Message) -> bool:
    """As quick as a handler can be."""
    return bool(message.payload["n"] % 10)
