"""Which function handles which queue."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeVar

import msgspec

from rooms.domain.magazine import Stored, main_of

F = TypeVar("F", bound=Callable[..., Any])

TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What a handler gets."""

    id: str
    queue: str
    payload: Any
    """The JSON that was sent, decoded."""
    shovels: int
    """How often it failed and came back; 0 on the first try."""
    loaded_at: datetime
    expires_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """A function and what holds for it."""

    queue: str
    call: Callable[[Any], Any]
    ignorable: tuple[type[Exception], ...] = ()
    timeout_s: float = TIMEOUT_S
    batch: bool = False


class Handlers:
    """The handlers of a process, by queue; give it to `rooms handlers module:name`."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    def on(
        self,
        queue: str,
        *,
        ignorable: Sequence[type[Exception]] = (),
        timeout_s: float = TIMEOUT_S,
        batch: bool = False,
    ) -> Callable[[F], F]:
        """A decorator: this function handles the messages of `queue`.

        It gets a `Message` (with `batch`: a sequence of them) and returns whether it is done: True, False, or for a batch
        a bool for each. An exception is a failure, unless of an `ignorable` class: then the message is dropped. What takes
        longer than `timeout_s` has failed. A plain function runs on a thread of its own, a coroutine function on the
        process's event loop. ValueError: the queue has a handler already, or the name is none.
        """
        main_of(queue)
        if queue in self._handlers:
            raise ValueError(f"the queue {queue} has a handler already")
        if timeout_s <= 0:
            raise ValueError("timeout_s is more than 0")

        def register(function: F) -> F:
            self._handlers[queue] = Handler(
                queue=queue, call=function, ignorable=tuple(ignorable), timeout_s=timeout_s, batch=batch
            )
            return function

        return register

    def __iter__(self) -> Iterator[Handler]:
        return iter(self._handlers.values())

    def __len__(self) -> int:
        return len(self._handlers)


def message_of(queue: str, stored: Stored) -> Message:
    """An entry as its handler gets it. ValueError: its body is no JSON."""
    entry = stored.entry
    return Message(
        id=entry.id,
        queue=queue,
        payload=msgspec.json.decode(entry.body),
        shovels=entry.shovels,
        loaded_at=stored.loaded_at,
        expires_at=entry.expires_at,
    )
