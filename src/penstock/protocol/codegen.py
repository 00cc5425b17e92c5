"""Generates and compiles the source of one decoder or encoder per (message, version).

A codec that interprets a schema does so at every field; this one does it once, at the first use of a version. The
source is straight-line Python, with nested structs and arrays as loops inside one function:

- neighbouring fixed-width fields, and the length that follows them, are packed with one ``Struct``;
- a compact length takes the one-byte path inline and calls ``read_uvarint`` / ``uvarint`` beyond it;
- a length or count is compared with the bytes that remain before anything is sliced or allocated.

``decoder_source`` and ``encoder_source`` return the text, which is the best explanation of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct, calcsize
from struct import error as struct_error
from typing import Any

from penstock.environment import FileRange
from penstock.protocol.errors import DecodeError
from penstock.protocol.primitives import ONE_BYTE, ArrayStructs, join_tags, read_uvarint, skip_tags, uvarint
from penstock.protocol.schema import ELEMENTS_MAX, Field, Message, is_flexible

# The kind of a fixed-width field is its code in the struct module.
FIXED = frozenset(("?", "b", "h", "H", "i", "q", "d", "16s"))

UNPACK_ARRAY = {code: ArrayStructs(code, "unpack_from") for code in FIXED}
PACK_ARRAY = {code: ArrayStructs(code, "pack") for code in FIXED}

_MISSING: Any = object()


def compile_decoder(cls: type[Message], version: int) -> Callable[..., Any]:
    writer = _DecoderWriter(version, is_flexible(cls, version))
    return _compile(writer.function(cls), f"{cls.__name__} v{version} decoder", "decode", writer.names)


def compile_encoder(cls: type[Message], version: int) -> Callable[..., Any]:
    writer = _EncoderWriter(version, is_flexible(cls, version))
    return _compile(writer.function(cls), f"{cls.__name__} v{version} encoder", "encode", writer.names)


def decoder_source(cls: type[Message], version: int) -> str:
    return _DecoderWriter(version, is_flexible(cls, version)).function(cls)


def encoder_source(cls: type[Message], version: int) -> str:
    return _EncoderWriter(version, is_flexible(cls, version)).function(cls)


def compile_init(cls: type[Message]) -> Callable[..., None]:
    """Compile the constructor: keywords only, the schema's defaults, a new list for each omitted array."""
    names: dict[str, Any] = {"MISSING": _MISSING}
    arguments = []
    lines = []
    for field in cls.FIELDS:
        fresh = _fresh_default(field, names)
        arguments.append(f"{field.name}={'MISSING' if fresh else repr(field.default)}")
        value = f"{fresh} if {field.name} is MISSING else {field.name}" if fresh else field.name
        lines.append(f"    self.{field.name} = {value}")
    head = f"def __init__(self{', *, ' if arguments else ''}{', '.join(arguments)}):"
    return _compile(
        "\n".join([head, *(lines or ["    pass"])]), f"{cls.__name__} constructor", "__init__", names
    )


def _compile(source: str, title: str, name: str, names: dict[str, Any]) -> Callable[..., Any]:
    exec(compile(source, f"<{title}>", "exec"), names)
    function: Callable[..., Any] = names[name]
    return function


def _fresh_default(field: Field, names: dict[str, Any]) -> str:
    """The expression for a default that must be a new object each time; empty if it may be shared."""
    if field.kind == "array" and field.default is not None:
        return "[]"
    if field.kind == "struct" and not field.nullable and field.tag is None:
        names[field.element.__name__] = field.element
        return f"{field.element.__name__}()"
    return ""


class _Writer:
    """Shared by decoder and encoder: lines, indentation, and the run of fixed-width fields not written yet."""

    def __init__(self, version: int, flexible: bool) -> None:
        self.version = version
        self.flexible = flexible
        self.names: dict[str, Any] = {}
        self.lines: list[str] = []
        self.depth = 1
        self.loops = 0
        # (struct code, target or value): consecutive fixed-width fields that one Struct will handle.
        self.run: list[tuple[str, str]] = []

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def name(self, prefix: str) -> str:
        """A name not used before, for loops inside loops."""
        self.loops += 1
        return f"{prefix}{self.loops}"

    def bind(self, cls: type[Message]) -> str:
        self.names[cls.__name__] = cls
        return cls.__name__

    def struct_method(self, codes: str, method: str) -> str:
        """The name by which the source calls a Struct's bound method."""
        name = f"{method}_{codes.replace('?', 't')}"
        self.names[name] = getattr(Struct(">" + codes), method)
        return name

    def fields(self, cls: type[Message]) -> tuple[list[Field], list[Field], list[Field]]:
        """The fields of this version in order, its tagged fields by tag, and the fields it does not have."""
        present, tagged, absent = [], [], []
        for field in cls.FIELDS:
            if not field.exists(self.version):
                absent.append(field)
            elif field.tag is not None:
                tagged.append(field)
            else:
                present.append(field)
        return present, sorted(tagged, key=lambda field: field.tag or 0), absent


class _DecoderWriter(_Writer):
    def function(self, cls: type[Message]) -> str:
        self.names.update(
            DecodeError=DecodeError,
            failures=(struct_error, IndexError, UnicodeDecodeError),
            new=object.__new__,
            read_uvarint=read_uvarint,
            skip_tags=skip_tags,
        )
        self.lines = ["def decode(buffer, p):"]
        self.line("end = len(buffer)")
        self.line(f"budget = {ELEMENTS_MAX}")
        self.line("try:")
        self.depth += 1
        self.struct(cls, "message")
        self.flush()
        self.depth -= 1
        self.line("except failures as error:")
        self.line(f"    raise DecodeError(f'{cls.__name__} v{self.version}: {{error}}') from None")
        self.line("return message, p")
        return "\n".join(self.lines)

    def struct(self, cls: type[Message], target: str) -> None:
        present, tagged, absent = self.fields(cls)
        # The target may be an attribute; fields are then set through a local variable.
        name = target if target.isidentifier() else self.name("o")
        self.line(f"{name} = new({self.bind(cls)})")
        for field in absent + tagged:
            self.line(f"{name}.{field.name} = {_fresh_default(field, self.names) or repr(field.default)}")
        for field in present:
            self.value(field, f"{name}.{field.name}")
        if self.flexible:
            self.tags(name, tagged)
        if name != target:
            self.line(f"{target} = {name}")

    def value(self, field: Field, target: str) -> None:
        if field.kind in FIXED:
            self.run.append((field.kind, target))
        elif field.kind == "struct":
            self.single_struct(field, target)
        else:
            bias = self.length(field)
            if field.is_nullable(self.version):
                self.line(f"if n == {bias - 1}:")
                self.line(f"    {target} = None")
                self.line("else:")
                self.depth += 1
            if field.kind == "array":
                self.array(field, target, bias)
            else:
                self.line(f"q = p + n{' - 1' if bias else ''}")
                # Also false for a null that is not allowed and for any negative length.
                self.line(f"if not p <= q <= end: raise DecodeError('{target}: bad length')")
                self.line(f"{target} = {SLICES[field.kind]}")
                self.line("p = q")
            if field.is_nullable(self.version):
                self.depth -= 1

    def length(self, field: Field) -> int:
        """Read a length or count into n. Returns the amount it is too high by: 1 for a compact length."""
        if self.flexible:
            self.run.append(("B", "n"))
            self.flush()
            if field.kind in ("records", "binary"):
                # The length of a batch takes two bytes more often than one.
                self.line("if n > 127:")
                self.line("    q = buffer[p]")
                self.line("    if q < 128: n += (q << 7) - 128; p += 1")
                self.line("    else: n, p = read_uvarint(buffer, p - 1)")
            else:
                self.line("if n > 127: n, p = read_uvarint(buffer, p - 1)")
            return 1
        self.run.append(("h" if field.kind == "string" else "i", "n"))
        self.flush()
        return 0

    def array(self, field: Field, target: str, bias: int) -> None:
        if bias:
            self.line("n -= 1")
        element = field.element
        fixed = isinstance(element, Field) and element.kind in FIXED
        size = calcsize(">" + element.kind) if fixed else self.size_min(element)
        times = f"n * {size}" if size > 1 else "n"
        self.line(f"if not 0 <= {times} <= end - p: raise DecodeError('{target}: bad count')")
        self.line("budget -= n")
        self.line("if budget < 0: raise DecodeError('too many elements')")
        if fixed:
            name = f"unpack_array_{element.kind.replace('?', 't')}"
            self.names[name] = UNPACK_ARRAY[element.kind]
            self.line(f"{target} = list({name}[n](buffer, p))")
            self.line(f"p += {times}")
            return
        items = self.name("a")
        self.line(f"{items} = {target} = []")
        self.line("for _ in range(n):")
        self.depth += 1
        item = self.name("o")
        if isinstance(element, Field):
            self.value(element, item)
        else:
            self.struct(element, item)
        self.flush()
        self.line(f"{items}.append({item})")
        self.depth -= 1

    def single_struct(self, field: Field, target: str) -> None:
        if not field.is_nullable(self.version):
            self.flush()
            self.struct(field.element, target)
            return
        # A nullable struct is preceded by a byte: -1 for null.
        self.run.append(("b", "n"))
        self.flush()
        self.line("if n < 0:")
        self.line(f"    {target} = None")
        self.line("else:")
        self.depth += 1
        self.struct(field.element, target)
        self.flush()
        self.depth -= 1

    def tags(self, owner: str, tagged: list[Field]) -> None:
        self.run.append(("B", "n"))
        self.flush()
        self.line("if n:")
        self.depth += 1
        if not tagged:
            self.line("p, budget = skip_tags(buffer, p - 1, budget)")
            self.depth -= 1
            return
        tag, last, stop = self.name("tag"), self.name("last"), self.name("stop")
        self.line("n, p = read_uvarint(buffer, p - 1)")
        self.line("budget -= n")
        self.line("if budget < 0: raise DecodeError('too many tags')")
        self.line(f"{last} = -1")
        self.line("for _ in range(n):")
        self.depth += 1
        self.line(f"{tag}, p = read_uvarint(buffer, p)")
        self.line("n, p = read_uvarint(buffer, p)")
        self.line(f"{stop} = p + n")
        # Tags are in ascending order (KIP-482), so this also rejects a duplicate tag.
        self.line(f"if {tag} <= {last} or {stop} > end: raise DecodeError('bad tag')")
        self.line(f"{last} = {tag}")
        for number, field in enumerate(tagged):
            self.line(f"{'elif' if number else 'if'} {tag} == {field.tag}:")
            self.depth += 1
            self.value(field, f"{owner}.{field.name}")
            self.flush()
            self.line(f"if p != {stop}: raise DecodeError('{field.name}: bad tag size')")
            self.depth -= 1
        self.line("else:")
        self.line(f"    p = {stop}")
        self.depth -= 2

    def flush(self) -> None:
        if not self.run:
            return
        targets = ", ".join(target for _, target in self.run)
        codes = "".join(code for code, _ in self.run)
        if codes == "B":
            self.line(f"{targets} = buffer[p]")
        else:
            comma = "," if len(self.run) == 1 else ""
            self.line(f"{targets}{comma} = {self.struct_method(codes, 'unpack_from')}(buffer, p)")
        self.line(f"p += {calcsize('>' + codes)}")
        self.run = []

    def size_min(self, element: type[Message] | Field) -> int:
        """The fewest bytes an element can take, to reject an impossible count before allocating."""
        if isinstance(element, Field):
            if element.kind in FIXED:
                return calcsize(">" + element.kind)
            if element.kind == "struct":
                return 1 if element.is_nullable(self.version) else self.size_min(element.element)
            return 1 if self.flexible else (2 if element.kind == "string" else 4)
        present, _, _ = self.fields(element)
        size = sum(self.size_min(field) for field in present) + self.flexible
        assert size > 0, f"{element.__name__} v{self.version} takes no bytes"
        return size


# How each kind is read from the buffer between p and q. Only records are not copied.
SLICES = {
    "string": "buffer[p:q].tobytes().decode()",
    "binary": "buffer[p:q].tobytes()",
    "records": "buffer[p:q]",
}


class _EncoderWriter(_Writer):
    def __init__(self, version: int, flexible: bool) -> None:
        super().__init__(version, flexible)
        # Functions that encode one tagged field each. They come before the main function.
        self.tag_functions: list[str] = []
        self.has_records = False

    def function(self, cls: type[Message]) -> str:
        self.names.update(
            FileRange=FileRange,
            ONE_BYTE=ONE_BYTE,
            join_tags=join_tags,
            records_size=_records_size,
            uvarint=uvarint,
        )
        self.struct(cls, "message")
        self.flush()
        head = ["def encode(message):", "    out = []", "    append = out.append"]
        if self.has_records:
            head.append("    parts = []")
            tail = ["    if out: parts.append(b''.join(out))", "    return parts"]
        else:
            tail = ["    return [b''.join(out)]"]
        return "\n".join([*self.tag_functions, *head, *self.lines, *tail])

    def struct(self, cls: type[Message], name: str) -> None:
        present, tagged, _ = self.fields(cls)
        for field in present:
            self.value(field, f"{name}.{field.name}")
        if not self.flexible:
            return
        if tagged:
            self.tags(name, tagged)
        else:
            self.run.append(("x", ""))

    def value(self, field: Field, value: str) -> None:
        if field.kind in FIXED:
            self.run.append((field.kind, value))
        elif field.kind == "struct":
            self.single_struct(field, value)
        elif field.kind == "records":
            self.records(value)
        else:
            self.sized(field, value)

    def sized(self, field: Field, value: str) -> None:
        """A string, bytes or an array: its length or count, then its content."""
        content = self.name("a") if field.kind == "array" else "v"
        encode = ".encode()" if field.kind == "string" else ""
        size = f"n = len({content}){' + 1' if self.flexible else ''}"
        if field.is_nullable(self.version):
            empty = "()" if field.kind == "array" else "b''"
            self.line(f"{content} = {value}")
            self.line(f"if {content} is None: {content} = {empty}; n = {0 if self.flexible else -1}")
            self.line(f"else: {content} = {content}{encode}; {size}")
        else:
            if field.kind == "string" and field.nullable:
                # Null exists only in newer versions; an older one gets the nearest valid value.
                value = f"({value} or '')"
            self.line(f"{content} = {value}{encode}")
            self.line(size)
        self.length("h" if field.kind == "string" else "i")
        if field.kind == "array":
            self.elements(field.element, content)
        else:
            self.line(f"append({content})")

    def elements(self, element: type[Message] | Field, items: str) -> None:
        if isinstance(element, Field) and element.kind in FIXED:
            name = f"pack_array_{element.kind.replace('?', 't')}"
            self.names[name] = PACK_ARRAY[element.kind]
            self.line(f"if {items}: append({name}[len({items})](*{items}))")
            return
        item = self.name("o")
        self.line(f"for {item} in {items}:")
        self.depth += 1
        if isinstance(element, Field):
            self.value(element, item)
        else:
            self.struct(element, item)
        self.flush()
        self.depth -= 1

    def records(self, value: str) -> None:
        self.has_records = True
        self.line(f"r = {value}")
        self.line("if r is None: n = -1")
        self.line(
            "else: n = r.size if type(r) is FileRange else records_size(r) if type(r) is list else len(r)"
        )
        if self.flexible:
            self.line("n += 1")
        self.length("i")
        self.line(f"if n > {1 if self.flexible else 0}:")
        self.line("    parts.append(b''.join(out))")
        self.line("    out.clear()")
        self.line("    if type(r) is list: parts += r")
        self.line("    else: parts.append(r)")

    def single_struct(self, field: Field, value: str) -> None:
        if not field.is_nullable(self.version):
            name = self.name("o")
            self.line(f"{name} = {value}")
            self.struct(field.element, name)
            return
        self.flush()
        name = self.name("o")
        self.line(f"{name} = {value}")
        self.line(f"if {name} is None: append(b'\\xff')")
        self.line("else:")
        self.depth += 1
        self.line("append(b'\\1')")
        self.struct(field.element, name)
        self.flush()
        self.depth -= 1

    def tags(self, owner: str, tagged: list[Field]) -> None:
        """Write the tagged fields that differ from their defaults. Usually there are none."""
        self.flush()
        tests = [self.is_sent(field, f"{owner}.{field.name}") for field in tagged]
        self.line(f"if {' or '.join(tests)}:")
        self.line("    tags = []")
        for field, test in zip(tagged, tests):
            encoded = f"{self.tag_function(field)}({owner}.{field.name})"
            self.line(f"    if {test}: tags.append(({field.tag}, {encoded}))")
        self.line("    append(join_tags(tags))")
        self.line("else: append(b'\\0')")

    def is_sent(self, field: Field, value: str) -> str:
        """The test whether a tagged field differs from its default."""
        if field.kind == "struct" and not field.nullable:
            # A struct with only default values counts as absent.
            differs = " or ".join(
                f"{value}.{inner.name} != {_fresh_default(inner, self.names) or repr(inner.default)}"
                for inner in field.element.FIELDS
            )
            return f"({value} is not None and ({differs}))"
        if field.default is None:
            return f"{value} is not None"
        return value if field.kind == "array" else f"{value} != {field.default!r}"

    def tag_function(self, field: Field) -> str:
        """Write a separate function for a tagged value, because its size in bytes comes first."""
        name = self.name(f"encode_{field.name}_")
        inner = _EncoderWriter(self.version, self.flexible)
        inner.names = self.names
        inner.loops = self.loops
        inner.value(field, "value")
        inner.flush()
        self.loops = inner.loops
        body = [f"def {name}(value):", "    out = []", "    append = out.append", *inner.lines]
        self.tag_functions += [*inner.tag_functions, *body, "    return b''.join(out)"]
        return name

    def length(self, code: str) -> None:
        """Write n, and the run before it: an int16 or int32, or a varint if the version is flexible."""
        if not self.flexible:
            self.run.append((code, "n"))
            self.flush()
            return
        run = self.run
        if not run:
            self.line("append(ONE_BYTE[n] if n < 128 else uvarint(n))")
            return
        short = self.pack([*run, ("B", "n")])
        self.line(f"append({short} if n < 128 else {self.pack(run)} + uvarint(n))")
        self.run = []

    def flush(self) -> None:
        if self.run:
            self.line(f"append({self.pack(self.run)})")
            self.run = []

    def pack(self, run: list[tuple[str, str]]) -> str:
        """The expression that packs a run. Code x writes the zero of an empty tag section."""
        codes = "".join(code for code, _ in run)
        values = ", ".join(value for code, value in run if code != "x")
        if not values:
            return repr(bytes(len(codes)))
        return f"{self.struct_method(codes, 'pack')}({values})"


def _records_size(parts: list[Any]) -> int:
    return sum(part.size if type(part) is FileRange else len(part) for part in parts)
