"""The notation for message schemas, and the functions that encode and decode messages.

A message is one class for all its versions::

    class TopicProduceData(Message):
        name: str = string("0-12")
        topic_id: bytes = uuid("13+")
        partition_data: list[PartitionProduceData] = array(PartitionProduceData)

Each field gives the versions in which it exists, those in which it may be null, and its tag if it has one
(KIP-482). A top-level message also gives its versions and the first flexible one; the structs inside it follow the
message they are in. ``decoder`` and ``encoder`` turn (class, version) into a function; ``codegen.py`` generates its
source on first use.

A field that a version does not have keeps its default when decoded and is silently dropped when encoded, so
handlers fill in everything they know. A tagged struct that was not sent is None.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, TypeAlias, TypeVar, dataclass_transform

from penstock.environment import Buffer, FileRange

# The value of a records field when encoding: bytes in memory, a range of a file, or several of these.
RecordsPart: TypeAlias = Buffer | FileRange
Records: TypeAlias = RecordsPart | list[RecordsPart] | None

VERSION_MAX = 2**15 - 1

# Limit for all arrays and tag sections in one decoded message together: otherwise the largest request allowed
# could become a hundred million Python objects.
ELEMENTS_MAX = 500_000

NO_UUID = bytes(16)

# Tags from here on are ours: fields that Kafka's messages do not have. Nodes of other releases skip them, and a
# missing field means that the sender does not know it.
OWN_TAGS = 10_000


class Field:
    """One field of a message. The functions below create it; its name comes from the class body."""

    __slots__ = ("default", "element", "kind", "name", "nullable", "tag", "versions")

    def __init__(
        self,
        kind: str,
        versions: str,
        default: Any,
        nullable: bool | str,
        tag: int | None,
        element: Any = None,
    ) -> None:
        self.name = ""
        self.kind = kind
        self.versions = versions
        self.default = default
        self.nullable = nullable
        self.tag = tag
        # For an array or a struct: the class of the element, or the Field of a primitive.
        self.element = element

    def exists(self, version: int) -> bool:
        return version in version_range(self.versions)

    def is_nullable(self, version: int) -> bool:
        if isinstance(self.nullable, str):
            return version in version_range(self.nullable)
        return self.nullable


# The functions return Any so that a field can be annotated with its value's type: ``acks: int = int16()``. They are
# not declared as field specifiers, because a type checker would then require ``default=`` in each of them.


def boolean(versions: str = "0+", *, default: bool = False, tag: int | None = None) -> Any:
    return Field("?", versions, default, False, tag)


def int8(versions: str = "0+", *, default: int = 0, tag: int | None = None) -> Any:
    return Field("b", versions, default, False, tag)


def int16(versions: str = "0+", *, default: int = 0, tag: int | None = None) -> Any:
    return Field("h", versions, default, False, tag)


def uint16(versions: str = "0+", *, default: int = 0, tag: int | None = None) -> Any:
    return Field("H", versions, default, False, tag)


def int32(versions: str = "0+", *, default: int = 0, tag: int | None = None) -> Any:
    return Field("i", versions, default, False, tag)


def int64(versions: str = "0+", *, default: int = 0, tag: int | None = None) -> Any:
    return Field("q", versions, default, False, tag)


def float64(versions: str = "0+", *, default: float = 0.0, tag: int | None = None) -> Any:
    return Field("d", versions, default, False, tag)


def uuid(versions: str = "0+", *, tag: int | None = None) -> Any:
    """16 raw bytes; zero means none."""
    return Field("16s", versions, NO_UUID, False, tag)


def string(
    versions: str = "0+", *, nullable: bool | str = False, default: str | None = "", tag: int | None = None
) -> Any:
    return Field("string", versions, default, nullable, tag)


def binary(
    versions: str = "0+", *, nullable: bool | str = False, default: bytes | None = b"", tag: int | None = None
) -> Any:
    return Field("binary", versions, default, nullable, tag)


def record_set(versions: str = "0+") -> Any:
    """Record batches, never copied: a memoryview when decoded, ``Records`` when encoded. Always nullable."""
    return Field("records", versions, None, True, None)


def array(
    element: Callable[..., Any],
    versions: str = "0+",
    *,
    nullable: bool | str = False,
    default: tuple[()] | None = (),
    tag: int | None = None,
) -> Any:
    """A list of structs (``array(TopicProduceData)``) or of primitives (``array(int32)``)."""
    of = element if isinstance(element, type) else element()
    return Field("array", versions, default, nullable, tag, of)


def struct(
    element: type[Message], versions: str = "0+", *, nullable: bool | str = False, tag: int | None = None
) -> Any:
    """A single struct. A tagged or nullable one defaults to None, which means absent."""
    return Field("struct", versions, None, nullable, tag, element)


@cache
def version_range(text: str) -> range:
    """Parse a range of versions: ``"3"``, ``"3-12"`` or ``"3+"``."""
    if text.endswith("+"):
        return range(int(text[:-1]), VERSION_MAX + 1)
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


@dataclass_transform(kw_only_default=True, eq_default=True)
class MessageType(type):
    """Turns the fields in a class body into slots. Compiles nothing: it runs for every class at start-up."""

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        *,
        key: int = -1,
        versions: str = "",
        flexible: str = "",
    ) -> MessageType:
        fields = []
        for attribute, value in namespace.items():
            if type(value) is Field:
                value.name = attribute
                fields.append(value)
        for field in fields:
            del namespace[field.name]
        namespace["__slots__"] = tuple([field.name for field in fields])
        namespace["FIELDS"] = fields
        namespace["KEY"] = key
        namespace["VERSIONS"] = versions
        namespace["FLEXIBLE"] = flexible
        return super().__new__(mcs, name, bases, namespace)

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: object) -> None:
        super().__init__(name, bases, namespace)


class Message(metaclass=MessageType):
    """A message, or a struct inside one: slots with the schema's defaults, compared and printed by value."""

    FIELDS: ClassVar[list[Field]]
    # The API key of a request or response, or the type of a metadata record; -1 when there is none.
    KEY: ClassVar[int]
    # Empty for a struct that is only used inside messages.
    VERSIONS: ClassVar[str]
    # Empty when no version is flexible.
    FLEXIBLE: ClassVar[str]

    def __init__(self, **values: Any) -> None:
        """A placeholder: the first construction of each class compiles the real constructor."""
        from penstock.protocol.codegen import compile_init  # noqa: PLC0415  (not needed for importing messages)

        cls = type(self)
        cls.__init__ = compile_init(cls)  # type: ignore[method-assign]
        cls.__init__(self, **values)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, field.name) == getattr(other, field.name) for field in self.FIELDS)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        values = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in self.FIELDS)
        return f"{type(self).__name__}({values})"


class Response(Message):
    """A response. ``for_error`` builds one that reports the same error for everything in the request."""

    @classmethod
    def for_error(cls, request: Any, version: int, error: int, message: str | None = None) -> Response:
        """The response to a request that failed as a whole.

        This implementation is for responses with an error at the top level. Those with an error per item, or in
        different places depending on the version, override it.
        """
        values: dict[str, Any] = {"error_code": error}
        if any(field.name == "error_message" for field in cls.FIELDS):
            values["error_message"] = message
        return cls(**values)

    def first_error(self) -> int:
        """The error at the top level, or of the first item. In a response from ``for_error``, its error."""
        return _first_error(self)


def _first_error(message: Message) -> int:
    for field in message.FIELDS:
        value = getattr(message, field.name)
        error = 0
        if field.name.endswith("error_code"):
            error = value
        elif field.kind == "array" and value and isinstance(value[0], Message):
            error = _first_error(value[0])
        if error:
            return error
    return 0


M = TypeVar("M", bound=Message)
Decoder: TypeAlias = Callable[[memoryview, int], tuple[M, int]]
Encoder: TypeAlias = Callable[[M], list[RecordsPart]]


_decoders: dict[tuple[type[Message], int], Any] = {}
_encoders: dict[tuple[type[Message], int], Any] = {}


def decoder(cls: type[M], version: int) -> Decoder[M]:
    """The function that decodes this version: (buffer, position) -> (message, next position).

    It raises only ``DecodeError``. The caller must handle bytes after the message.
    """
    function: Decoder[M] | None = _decoders.get((cls, version))
    if function is None:
        from penstock.protocol.codegen import compile_decoder  # noqa: PLC0415

        function = compile_decoder(cls, _checked(cls, version))
        _decoders[cls, version] = function
    return function


def encoder(cls: type[M], version: int) -> Encoder[M]:
    """The function that encodes this version: message -> buffers and file ranges, in order."""
    function: Encoder[M] | None = _encoders.get((cls, version))
    if function is None:
        from penstock.protocol.codegen import compile_encoder  # noqa: PLC0415

        function = compile_encoder(cls, _checked(cls, version))
        _encoders[cls, version] = function
    return function


def decode(cls: type[M], version: int, buffer: Buffer) -> M:
    """Decode one message from the start of a buffer."""
    return decoder(cls, version)(memoryview(buffer), 0)[0]


def encode(message: Message, version: int) -> bytes:
    """Encode one message into bytes. Not for messages whose records are in files."""
    parts = encoder(type(message), version)(message)
    assert not any(isinstance(part, FileRange) for part in parts), "records in a file cannot be joined"
    return b"".join(parts)  # type: ignore[arg-type]


def is_flexible(cls: type[Message], version: int) -> bool:
    return bool(cls.FLEXIBLE) and version in version_range(cls.FLEXIBLE)


def _checked(cls: type[Message], version: int) -> int:
    if not cls.VERSIONS or version not in version_range(cls.VERSIONS):
        raise ValueError(f"{cls.__name__} has no version {version}")
    return version
