"""Register functions as handlers of queues: the public API."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeVar

from rooms.domain.magazine import StoredEntry, main_magazine_name
from rooms.publishing.number_bounds import decode_json

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Hold the message with which a handler is called."""

    id: str
    queue: str
    payload: Any
    """The JSON that was sent, decoded."""
    shovels: int
    """Number of times the shovel brought it back; 0 at the first attempt."""
    loaded_at: datetime
    expires_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """Hold a function with its queue and options."""

    queue: str
    call: Callable[[Any], Any]
    ignorable: tuple[type[Exception], ...] = ()
    timeout_s: float = DEFAULT_TIMEOUT_S
    batch: bool = False


class Handlers:
    """Register the handlers of a process, by queue. Run them with `rooms handlers module:name`."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    def on(
        self,
        queue: str,
        *,
        ignorable: Sequence[type[Exception]] = (),
        timeout_s: float = DEFAULT_TIMEOUT_S,
        batch: bool = False,
    ) -> Callable[[F], F]:
        """Return a decorator that registers a function as the handler of `queue`.

        The function is called with a `Message` (with `batch`: a sequence of them). It returns True
        for handled and False for failed; for a batch one bool, or one for each message. An
        exception is a failure, unless it is `ignorable`: then the message is dropped. A call that
        takes longer than `timeout_s` has failed. A plain function runs on its own thread, a
        coroutine function on the process's event loop. ValueError: the queue has a handler, or its
        name is invalid.
        """
        main_magazine_name(queue)
        if queue in self._handlers:
            raise ValueError(f"the queue {queue} has a handler already")
        if timeout_s <= 0:
            raise ValueError("timeout_s must be more than 0")

        def register(function: F) -> F:
            self._handlers[queue] = Handler(
                queue=queue,
                call=function,
                ignorable=tuple(ignorable),
                timeout_s=timeout_s,
                batch=batch,
            )
            return function

        return register

    def __iter__(self) -> Iterator[Handler]:
        return iter(self._handlers.values())

    def __len__(self) -> int:
        return len(self._handlers)


def to_message(queue: str, stored: StoredEntry) -> Message:
    """Return the message of an entry. ValueError: its body is not JSON."""
    entry = stored.entry
    return Message(
        id=entry.id,
        queue=queue,
        payload=decode_json(entry.body),
        shovels=entry.shovels,
        loaded_at=stored.loaded_at,
        expires_at=entry.expires_at,
    )
