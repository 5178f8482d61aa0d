"""Answer a name that does not exist with the nearest one, and with the command that lists them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from rooms.cli.errors import CliError, ProblemError
from rooms.domain.similar_names import suggestion

if TYPE_CHECKING:
    from rooms.cli.client import ApiClient

_EVENT_TYPE: Final = "event_type"


def suggested(client: "ApiClient", path: str, name: str) -> str:
    """Return `; is NAME meant?` with the nearest name of a list's first page, or nothing."""
    try:
        page = client.page(path, whole=False)
    except CliError:
        # A key may read one thing without being allowed to list all, or the service is gone now.
        return ""
    return suggestion(name, {one["name"] for one in page["items"]})


@contextmanager
def event_type_advice(
    client: "ApiClient", room: Mapping[str, Any], name: str | None = None
) -> Iterator[None]:
    """Add the command that lists event types to the error for an unknown one.

    With `name`, the type that the path of the request has, also add the nearest one. A message's
    type is a field, for which the service has named the nearest one already.
    """
    try:
        yield
    except ProblemError as exc:
        listed = f"`rooms event-type list {room['name']}` shows them"
        if name is not None and exc.status == HTTPStatus.NOT_FOUND:
            exc.advice = listed + suggested(client, f"/rooms/{room['id']}/event-types", name)
        elif any(field == _EVENT_TYPE for field, _ in exc.fields):
            exc.advice = listed
        raise
