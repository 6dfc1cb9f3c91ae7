"""Reads request bytes so that a malformed message gets INVALID_ARGUMENT naming the field, not gRPC's INTERNAL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from google.protobuf import message
from google.protobuf.descriptor import FieldDescriptor

from services.dpu_gateway.errors import FieldError

Request = TypeVar("Request", bound=message.Message)


def lenient_parser(kind: type[Request]) -> Callable[[bytes], Request | FieldError]:
    """A gRPC request deserializer that returns the error instead of raising it: raised there, gRPC would hide it."""

    def parse(data: bytes) -> Request | FieldError:
        try:
            return kind.FromString(data)
        except message.DecodeError:
            try:
                field = _first_bad_string(kind.DESCRIPTOR, memoryview(data))
            except (IndexError, ValueError):
                field = None
            if field is None:
                return FieldError("", f"the request is not a valid {kind.DESCRIPTOR.full_name} message")
            return FieldError(field, "is not valid UTF-8")

    return parse


def _first_bad_string(descriptor: Any, data: memoryview) -> str | None:
    """Path of the first string field whose bytes are not UTF-8. Raises IndexError or ValueError on broken framing.

    ``descriptor`` is a protobuf message descriptor of either implementation.
    """
    seen: dict[int, int] = {}
    for number, payload in _length_delimited_fields(data):
        field = descriptor.fields_by_number.get(number)
        if field is None:
            continue
        name = field.name
        if field.is_repeated:
            name += f"[{seen.setdefault(number, 0)}]"
            seen[number] += 1
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                str(payload, "utf-8")
            except UnicodeDecodeError:
                return str(name)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = _first_bad_string(field.message_type, payload)
            if inner is not None:
                return f"{name}.{inner}"
    return None


def _length_delimited_fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(field number, payload) of the length-delimited fields of one message; skips the others."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        match key & 7:
            case 0:
                _, position = _varint(data, position)
            case 1:
                position += 8
            case 2:
                length, position = _varint(data, position)
                if position + length > len(data):
                    raise ValueError("truncated")
                yield key >> 3, data[position : position + length]
                position += length
            case 5:
                position += 4
            case kind:
                raise ValueError(f"wire type {kind}")


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
