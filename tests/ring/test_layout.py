"""One layout: schema.py, numpy and a C++ compiler agree on it, and it scales to the limits it promises."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from services.ring import codegen, dtypes, schema
from services.ring.schema import RingGeometry

STRUCT_NAMES = [struct.name for struct in schema.STRUCTS]
Layout = dict[str, tuple[int, int]]  # "Struct.field" -> (offset, bytes); "Struct" -> (0, size)

POSITIONS = (0, 41, 2**32 - 2, 2**32 - 1, 2**32, 2**64 - 1)  # the wrap of the 32-bit tag among them
LARGEST = RingGeometry(lanes=256, slots_per_lane=4096, arena_bytes=1 << 37, log_entries=1 << 31)


def layout_of_schema() -> Layout:
    layout: Layout = {}
    for struct in schema.STRUCTS:
        layout[struct.name] = (0, struct.size)
        for offset, field in struct.offsets():
            layout[f"{struct.name}.{field.name}"] = (offset, field.bytes)
    return layout


def layout_of_numpy() -> Layout:
    layout: Layout = {}
    for struct in schema.STRUCTS:
        dtype = dtypes.dtype_of(struct)
        layout[struct.name] = (0, dtype.itemsize)
        assert dtype.fields is not None
        for name, (kind, offset, *_) in dtype.fields.items():
            layout[f"{struct.name}.{name}"] = (offset, kind.itemsize)
    return layout


def layout_of_cpp(folder: Path) -> Layout:
    """Ask a compiler, over the header that the build generates."""
    (folder / "ring_layout.hpp").write_text(codegen.render())
    lines = ['#include "ring_layout.hpp"', "#include <cstdio>", "using namespace blink::ring;", "int main() {"]
    for struct in schema.STRUCTS:
        lines.append(f'std::printf("{struct.name} 0 %zu\\n", sizeof({struct.name}));')
        for field in struct.fields:
            member = f"{struct.name}, {field.name}"
            lines.append(
                f'std::printf("{struct.name}.{field.name} %zu %zu\\n", offsetof({member}), '
                f"sizeof({struct.name}::{field.name}));"
            )
    lines += [f'std::printf("tag{position} 0 %u\\n", submission_tag({position}u));' for position in POSITIONS]
    lines.append('std::printf("doorbell %llu 0\\n", (unsigned long long)doorbell_word(41, 640));')
    (folder / "main.cpp").write_text("\n".join([*lines, "}"]))
    subprocess.run(
        ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "main.cpp", "-o", "main"], cwd=folder, check=True
    )
    output = subprocess.run([folder / "main"], capture_output=True, text=True, check=True).stdout
    parts = (line.split() for line in output.splitlines())
    return {name: (int(offset), int(size)) for name, offset, size in parts}


def test_numpy_agrees_with_the_schema() -> None:
    assert layout_of_numpy() == layout_of_schema()


def test_cpp_agrees_with_the_schema(tmp_path: Path) -> None:
    cpp = layout_of_cpp(tmp_path)
    for position in POSITIONS:
        assert cpp.pop(f"tag{position}")[1] == schema.submission_tag(position)
    assert cpp.pop("doorbell")[0] == schema.doorbell_word(41, 640)
    assert cpp == layout_of_schema()


def test_a_moved_field_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = layout_of_schema()
    moved = schema.Struct("LogEntry", schema.LOG_ENTRY.writer, "", 16, schema.LOG_ENTRY.fields[::-1])
    monkeypatch.setattr(schema, "STRUCTS", (*schema.STRUCTS[:-1], moved))
    assert layout_of_schema() != before
    assert schema._layout_hash() != schema.LAYOUT_HASH


@pytest.mark.parametrize("name", STRUCT_NAMES)
def test_every_struct_but_log_entries_is_whole_lines(name: str) -> None:
    """So that no two structs, and so no two writers, share a line; log entries lie in an area of their own."""
    struct = next(struct for struct in schema.STRUCTS if struct.name == name)
    assert struct.size % schema.LINE_BYTES == 0 or (struct is schema.LOG_ENTRY and schema.LINE_BYTES % struct.size == 0)


def test_a_field_that_c_would_pad_is_refused() -> None:
    fields = (schema.Field("small", "u32", ""), schema.Field("large", "u64", ""))
    with pytest.raises(ValueError, match="large at 4 is not aligned"):
        list(schema.Struct("Bad", schema.Writer.ENGINE, "", 64, fields).offsets())


def test_doorbell_holds_the_offset_of_any_record_of_the_largest_arena() -> None:
    last_line = LARGEST.arena_bytes - schema.LINE_BYTES
    word = schema.doorbell_word(2**32 - 2, last_line)
    assert word >> 32 == schema.submission_tag(2**32 - 2)
    assert (word & 0xFFFF_FFFF) * schema.LINE_BYTES == last_line
    assert word < 1 << 64


def test_slot_numbers_fit_the_log_entry() -> None:
    assert LARGEST.slots_per_lane <= np.iinfo(dtypes.LOG_ENTRY["slot"]).max + 1


def test_longest_prompts_need_no_slab_per_slot() -> None:
    """4,096 slots and a 131,072-token prompt: the arena holds what is used, not slots times the longest."""
    longest = schema.record_bytes(131_072, 1)
    geometry = RingGeometry(lanes=1, slots_per_lane=4096, arena_bytes=64 << 20, log_entries=1 << 16)
    assert longest < geometry.arena_bytes < geometry.slots_per_lane * longest / 16


@pytest.mark.parametrize(
    ("field", "value"),
    [("lanes", 0), ("lanes", 257), ("slots_per_lane", 4097), ("arena_bytes", 100), ("log_entries", 52)],
)
def test_geometry_outside_the_limits_is_refused_by_name(field: str, value: int) -> None:
    sizes = {"lanes": 1, "slots_per_lane": 8, "arena_bytes": 1 << 16, "log_entries": 128} | {field: value}
    with pytest.raises(ValueError, match=f"ring {field} is {value}"):
        RingGeometry(**sizes)


def test_arena_must_be_whole_lines() -> None:
    with pytest.raises(ValueError, match="arena_bytes is 1000, must be a multiple of 64"):
        RingGeometry(lanes=1, slots_per_lane=8, arena_bytes=1000, log_entries=128)
