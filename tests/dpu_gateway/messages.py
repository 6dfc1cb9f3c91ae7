"""Any messages of a protobuf type, as hypothesis strategies: what a client with the right stubs could send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf import message
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import strategies as st

Message = TypeVar("Message", bound=message.Message)
MAX_REPEATED = 4


def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    edges = st.sampled_from([0, 1, low, high])
    return st.integers(0, 8) | edges | st.integers(low, high)


SCALARS: Mapping[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_DOUBLE: st.floats() | st.floats(0, 2),
    FieldDescriptor.TYPE_FLOAT: st.floats(width=32) | st.floats(0, 2, width=32),
    FieldDescriptor.TYPE_INT32: _integers(-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_INT64: _integers(-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_UINT32: _integers(0, (1 << 32) - 1),
    FieldDescriptor.TYPE_UINT64: _integers(0, (1 << 64) - 1),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.text(max_size=12),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=12),
}


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Each field is set or not; values lie at the edges of their types as often as near what makes sense."""
    return _fields(kind.DESCRIPTOR).map(lambda fields: kind(**fields))


def _fields(descriptor: Any) -> st.SearchStrategy[dict[str, Any]]:
    optional: dict[str, st.SearchStrategy[Any]] = {}
    groups: dict[str, list[Any]] = {}
    for field in descriptor.fields:
        group = field.containing_oneof
        if group is not None and len(group.fields) > 1:
            groups.setdefault(group.name, []).append(field)
        else:
            optional[field.name] = _values(field)
    choices = [
        st.one_of(st.just({}), *(st.fixed_dictionaries({field.name: _values(field)}) for field in fields))
        for fields in groups.values()
    ]
    parts = st.tuples(st.fixed_dictionaries({}, optional=optional), *choices)
    return parts.map(lambda found: {name: value for part in found for name, value in part.items()})


def _values(field: Any) -> st.SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (_values(each) for each in field.message_type.fields)
        return st.dictionaries(key, value, max_size=MAX_REPEATED)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        one = st.deferred(lambda: _fields(field.message_type))
    elif field.type == FieldDescriptor.TYPE_ENUM:
        one = st.sampled_from([value.number for value in field.enum_type.values])
    else:
        one = SCALARS[field.type]
    return st.lists(one, max_size=MAX_REPEATED) if field.is_repeated else one
