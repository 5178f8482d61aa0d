"""What tables are made of: one `metadata` for all, and columns, one function a type."""

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Text,
    Uuid,
    func,
)
from sqlalchemy.dialects.postgresql import ENUM
from sqlalchemy.types import UserDefinedType

from rooms.domain.states import State

metadata: Final = MetaData()
DELIVERY_STATE: Final = ENUM(*(state.value for state in State), name="delivery_state", metadata=metadata)


class Xid8(UserDefinedType[int]):
    """A transaction's number, 64 bits wide."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        """PostgreSQL's name of the type."""
        return "xid8"


def id_column(name: str, *, null: bool = False) -> Column[str]:
    """An id, text in the house."""
    return Column(name, Uuid(as_uuid=False), nullable=null)


def room_column() -> Column[int]:
    """The room that a row belongs to."""
    return Column("room_id", Integer, nullable=False)


def text_column(name: str, *, null: bool = False, default: str | None = None) -> Column[str]:
    """Text."""
    return Column(name, Text, nullable=null, server_default=default)


def int_column(name: str, *, null: bool = False, default: str | None = None) -> Column[int]:
    """32 bits."""
    return Column(name, Integer, nullable=null, server_default=default)


def small_column(name: str, *, null: bool = False, default: str | None = None) -> Column[int]:
    """16 bits."""
    return Column(name, SmallInteger, nullable=null, server_default=default)


def big_column(name: str, *, null: bool = False, default: str | None = None) -> Column[int]:
    """64 bits."""
    return Column(name, BigInteger, nullable=null, server_default=default)


def flag_column(name: str) -> Column[bool]:
    """False unless said otherwise."""
    return Column(name, Boolean, nullable=False, server_default="false")


def bytes_column(name: str, *, null: bool = False) -> Column[bytes]:
    """Bytes."""
    return Column(name, LargeBinary, nullable=null)


def time_column(name: str) -> Column[Any]:
    """A time, now unless said otherwise."""
    return Column(name, DateTime(timezone=True), nullable=False, server_default=func.now())


def time_or_null(name: str) -> Column[Any]:
    """A time, or none."""
    return Column(name, DateTime(timezone=True), nullable=True)
