"""What stands in paths. Text that can be no id is answered as an id that nothing has: 404."""

import re
from typing import Annotated, Final

from litestar.params import PathParameter

from rooms.domain.ids import MAX_ROOM, RoomId
from rooms.domain.names import MAX_NAME, NAME, NAME_PATTERN
from rooms.errors import NotFoundError

_ID_PATTERN: Final = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
_ID: Final = re.compile(_ID_PATTERN[1:-1])
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,9}")
_MAX_VERSION: Final = 0x7FFF_FFFF

RoomPath = Annotated[
    str, PathParameter(description="The room's id, a whole number.", schema_extra={"pattern": "^[1-9][0-9]{0,9}$"})
]
IdPath = Annotated[str, PathParameter(description="The id, a UUID.", schema_extra={"pattern": _ID_PATTERN})]
NamePath = Annotated[
    str,
    PathParameter(description="The event type's name.", schema_extra={"pattern": NAME_PATTERN, "maxLength": MAX_NAME}),
]
VersionPath = Annotated[
    str, PathParameter(description="The number of the version.", schema_extra={"pattern": "^[1-9][0-9]{0,9}$"})
]


def parse_room(text: str) -> RoomId:
    """A room's id; NotFoundError where the text can be none."""
    if not _NUMBER.fullmatch(text) or int(text) > MAX_ROOM:
        raise NotFoundError("there is no such room: a path takes the id, a whole number; GET /v1/rooms?name=… finds it")
    return RoomId(int(text))


def parse_id(text: str, what: str) -> str:
    """An id as text; NotFoundError (there is no such `what`) where the text can be none."""
    if not _ID.fullmatch(text):
        raise NotFoundError(f"there is no such {what}: its id is a UUID, in lower case")
    return text


def parse_name(text: str) -> str:
    """A name; NotFoundError where the text can be none."""
    if not NAME.fullmatch(text) or len(text) > MAX_NAME:
        raise NotFoundError("there is no such event type")
    return text


def parse_version(text: str) -> int:
    """A version's number; NotFoundError where the text can be none."""
    if not _NUMBER.fullmatch(text) or int(text) > _MAX_VERSION:
        raise NotFoundError("there is no such version")
    return int(text)
