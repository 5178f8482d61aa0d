"""Split lists into pages, continued by a sealed cursor that a client cannot make up."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, TypeVar

from litestar.params import QueryParameter

from rooms.db.secrets import Cipher
from rooms.errors import FieldProblem, InvalidError

T = TypeVar("T")
PageT = TypeVar("PageT")

MAX_LIMIT: Final = 200
MAX_CURSOR: Final = 4096
"""Characters of a cursor. That of the longest position is shorter: a name of 512 characters, of up
to 4 bytes each.
"""

Limit = Annotated[
    int, QueryParameter(ge=1, le=MAX_LIMIT, description="The most items that a page holds.")
]
Cursor = Annotated[
    str | None,
    QueryParameter(description="The `next_cursor` of the page before, with the same filters."),
]


class PageRequest:
    """Read one page of a list: query one item more than fits, then make the response."""

    def __init__(self, cipher: Cipher, list_name: str, limit: int, cursor: str | None) -> None:
        """Open the cursor. InvalidError: it is not one of this list."""
        self._cipher = cipher
        self._list_name = list_name
        self._limit = limit
        self.after = decode_cursor(cipher, list_name, cursor)
        """The position of the last item of the page before; None: this is the first page."""
        self.fetch_limit = limit + 1
        """The number of items to query: one more than fits shows that another page follows."""

    def split(
        self, found: Sequence[T], position: Callable[[T], str], further: str | None = None
    ) -> tuple[Sequence[T], str | None]:
        """Return the items that fit and the cursor of the next page.

        `position(item)` identifies an item in the list. `further`: the position at which the list
        goes on although fewer items were found; None: it ends with them.
        """
        if len(found) <= self._limit:
            if further is None:
                return found, None
            return found, encode_cursor(self._cipher, self._list_name, further)
        items = found[: self._limit]
        return items, encode_cursor(self._cipher, self._list_name, position(items[-1]))

    def respond(
        self,
        page: Callable[..., PageT],
        found: Sequence[T],
        to_item: Callable[[T], Any] | None = None,
        *,
        position: Callable[[T], str],
        further: str | None = None,
    ) -> PageT:
        """Return `page(items=…, next_cursor=…)`, each item as it is or converted by `to_item`.

        `further`: as for `split`.
        """
        items, next_cursor = self.split(found, position, further)
        converted = list(items) if to_item is None else [to_item(item) for item in items]
        return page(items=converted, next_cursor=next_cursor)


def encode_cursor(cipher: Cipher, list_name: str, position: str) -> str:
    """Seal a position in a list as a cursor of that list."""
    sealed = cipher.encrypt(position.encode(), _cursor_purpose(list_name))
    return urlsafe_b64encode(sealed).rstrip(b"=").decode("ascii")


def decode_cursor(cipher: Cipher, list_name: str, cursor: str | None) -> str | None:
    """Return the position in a cursor. InvalidError: it is not a cursor of this list."""
    if cursor is None:
        return None
    try:
        if len(cursor) > MAX_CURSOR:
            raise ValueError("too long")
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        return cipher.decrypt(urlsafe_b64decode(padded), _cursor_purpose(list_name)).decode()
    except ValueError as exc:
        raise InvalidError(FieldProblem("cursor", "is not a next_cursor of this list")) from exc


def _cursor_purpose(list_name: str) -> bytes:
    return b"cursor " + list_name.encode()
