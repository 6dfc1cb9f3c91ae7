"""Write the ring's layout as a C++ header: ``python -m services.ring.codegen OUTPUT``.

Run by the build. The structs carry static_asserts of every offset and size, so a compiler that disagrees with
schema.py stops the build.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from services.ring import schema

CPP_TYPES = {
    "u8": "std::uint8_t",
    "u16": "std::uint16_t",
    "u32": "std::uint32_t",
    "i32": "std::int32_t",
    "f32": "float",
    "u64": "std::uint64_t",
}

CONSTANTS = {
    "kMagic": ("std::uint64_t", schema.MAGIC),
    "kAbiVersion": ("std::uint32_t", schema.ABI_VERSION),
    "kLayoutHash": ("std::uint64_t", schema.LAYOUT_HASH),
    "kLineBytes": ("std::uint32_t", schema.LINE_BYTES),
    "kMaxStopTokens": ("std::uint32_t", schema.MAX_STOP_TOKENS),
    "kMaxTopLogprobs": ("std::uint32_t", schema.MAX_TOP_LOGPROBS),
    "kMinPriority": ("std::int32_t", schema.MIN_PRIORITY),
    "kMaxPriority": ("std::int32_t", schema.MAX_PRIORITY),
    "kMaxTemperature": ("float", schema.MAX_TEMPERATURE),
    "kMaxRepetitionPenalty": ("float", schema.MAX_REPETITION_PENALTY),
    "kMaxAdditivePenalty": ("float", schema.MAX_ADDITIVE_PENALTY),
}


def _enum_lines() -> Iterator[str]:
    for kind in schema.ENUMS:
        yield f"enum class {kind.__name__} : std::uint32_t {{"
        for member in kind:
            camel = "".join(part.capitalize() for part in str(member.name).split("_"))
            yield f"  k{camel} = {member.value},"
        yield "};"
        yield ""


def _struct_lines(struct: schema.Struct) -> Iterator[str]:
    yield f"// Written by: {struct.writer.value}. {struct.doc}"
    yield f"struct alignas({min(struct.size & -struct.size, schema.LINE_BYTES)}) {struct.name} {{"
    for _, field in struct.offsets():
        array = f"[{field.count}]" if field.count > 1 else ""
        yield f"  {CPP_TYPES[field.type]} {field.name}{array};  // {field.doc}"
    used = max(offset + field.bytes for offset, field in struct.offsets())
    if used < struct.size:
        yield f"  std::uint8_t padding[{struct.size - used}];"
    yield "};"
    yield f"static_assert(sizeof({struct.name}) == {struct.size});"
    for offset, field in struct.offsets():
        yield f"static_assert(offsetof({struct.name}, {field.name}) == {offset});"
    yield ""


FUNCTIONS = """\
#if defined(__CUDACC__)
#define BLINK_RING_FN __host__ __device__ constexpr
#else
#define BLINK_RING_FN constexpr
#endif

BLINK_RING_FN std::uint32_t submission_tag(std::uint64_t position) {
  return static_cast<std::uint32_t>(position % 0xFFFF'FFFFu) + 1;
}
BLINK_RING_FN std::uint64_t doorbell_word(std::uint64_t position, std::uint64_t record_offset) {
  return std::uint64_t{submission_tag(position)} << 32 | record_offset / kLineBytes;
}
BLINK_RING_FN std::uint64_t slot_status_word(std::uint32_t tag, SlotPhase phase, FinishReason reason) {
  return std::uint64_t{tag} << 32 | static_cast<std::uint64_t>(phase) << 16 | static_cast<std::uint64_t>(reason);
}
"""


def render() -> str:
    """The header's text."""
    lines = [
        "// Generated from services/ring/schema.py; do not edit.",
        "#pragma once",
        "",
        "#include <cstddef>",
        "#include <cstdint>",
        "",
        "namespace blink::ring {",
        "",
    ]
    for name, (kind, value) in CONSTANTS.items():
        suffix = "u" if "uint" in kind else ""
        lines.append(f"inline constexpr {kind} {name} = {value}{suffix};")
    lines += [
        f"inline constexpr std::uint64_t k{struct.name}Offset = {schema.header_offset(struct)};"
        for struct in schema.HEADER_STRUCTS
    ]
    lines.append("")
    lines += _enum_lines()
    for struct in schema.STRUCTS:
        lines += _struct_lines(struct)
    lines.append(FUNCTIONS)
    lines.append("}  // namespace blink::ring")
    return "\n".join(lines) + "\n"


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m services.ring.codegen OUTPUT")
    Path(sys.argv[1]).write_text(render())


if __name__ == "__main__":
    main()
