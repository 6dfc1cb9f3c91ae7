"""The ring's layout, defined once.

Everything else is derived from here: numpy dtypes (``dtypes.py``), the C++ structs (``codegen.py``, run by the build)
and the reference in docs/ring.md. Only the standard library is used, so that the build can import it.

A ring is one region::

    header   RingInfo | BootstrapControl | EngineStatus | EngineCounters | LaneStatus[lanes]
    inbound  lane 0, lane 1, ...   each: LaneInbound | doorbells | cancels | arena        (written by its gateway)
    outbound lane 0, lane 1, ...   each: LaneOutbound | slot statuses | token log         (written by the engine)

Every struct starts on a 64-byte line and has one writer. Every lane area is page aligned, so each can be a memory
region with its own access rights.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = 0x474E_524B_4E49_4C42  # "BLINKRNG" in memory order
ABI_VERSION = 1
LINE_BYTES = 64
AREA_ALIGNMENT = 4096
MAX_STOP_TOKENS = 16
MAX_TOP_LOGPROBS = 20

SCALAR_BYTES = {"u8": 1, "u16": 2, "u32": 4, "i32": 4, "f32": 4, "u64": 8}


class Writer(enum.Enum):
    """Who may write a struct; all others only read it."""

    BOOTSTRAP = "bootstrap"
    ENGINE = "engine"
    GATEWAY = "gateway"


class EngineState(enum.IntEnum):
    BOOTING = 1
    READY = 2
    DRAINING = 3
    FAILED = 4


class Command(enum.IntEnum):
    """What bootstrap asks of the control loop."""

    RUN = 0
    DRAIN = 1  # finish what was submitted, refuse what is new
    STOP = 2  # end every request now and leave the loop


class LanePhase(enum.IntEnum):
    FREE = 0
    ATTACHED = 1


class SlotPhase(enum.IntEnum):
    FREE = 0
    WAITING = 1
    RUNNING = 2


class LogKind(enum.IntEnum):
    ADMITTED = 1  # value: seconds waited, token: prompt tokens found in the prefix cache
    TOP_LOGPROB = 2  # token, value: its log-probability; belongs to the next TOKEN of the same slot
    TOKEN = 3  # token, value: its log-probability (0 unless asked for)
    FINISH = 4  # detail: FinishReason, token: RejectCode when REJECTED


class FinishReason(enum.IntEnum):
    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    TIME_LIMIT = 4
    REJECTED = 5
    QUEUE_FULL = 6
    SHUTDOWN = 7  # the engine drained or stopped before the request could finish


class RejectCode(enum.IntEnum):
    """Why the engine refused a submission. Gateways validate first, so any of these is a fault or an attack."""

    NONE = 0
    BAD_RECORD = 1  # the record leaves the arena
    BAD_SLOT = 2
    SLOT_BUSY = 3
    EMPTY_PROMPT = 4
    PROMPT_TOO_LONG = 5
    BAD_TOKEN_BUDGET = 6  # max_tokens or min_tokens
    BAD_TOKEN_ID = 7
    BAD_SAMPLING = 8
    BAD_STOP_TOKENS = 9
    BAD_PRIORITY = 10
    RECORD_OVERLAP = 11  # the record's span belongs to a live request of the lane


MIN_PRIORITY, MAX_PRIORITY = -4, 4
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 10.0
MAX_ADDITIVE_PENALTY = 2.0


class DescriptorFlag(enum.IntFlag):
    IGNORE_EOS = 1
    LOGPROBS = 2
    NO_PREFIX_CACHE = 4  # neither found in the prefix cache nor kept there


@dataclass(frozen=True)
class Field:
    name: str
    type: str
    doc: str
    count: int = 1

    @property
    def bytes(self) -> int:
        return SCALAR_BYTES[self.type] * self.count


@dataclass(frozen=True)
class Struct:
    """A C struct with natural alignment, padded to ``size`` bytes."""

    name: str
    writer: Writer
    doc: str
    size: int
    fields: tuple[Field, ...]

    def offsets(self) -> Iterator[tuple[int, Field]]:
        """Yield (byte offset, field); refuses a layout that C would pad or that outgrows ``size``."""
        offset = 0
        for field in self.fields:
            if offset % SCALAR_BYTES[field.type]:
                raise ValueError(f"{self.name}.{field.name} at {offset} is not aligned")
            yield offset, field
            offset += field.bytes
        if offset > self.size:
            raise ValueError(f"{self.name} needs {offset} bytes, has {self.size}")

    def offset_of(self, name: str) -> int:
        return next(offset for offset, field in self.offsets() if field.name == name)


RING_INFO = Struct(
    "RingInfo",
    Writer.BOOTSTRAP,
    "What the ring is; never changes after magic is written.",
    256,
    (
        Field("magic", "u64", "MAGIC, written last"),
        Field("abi_version", "u32", "ABI_VERSION"),
        Field("lanes", "u32", "number of lanes"),
        Field("layout_hash", "u64", "LAYOUT_HASH of the writer's schema"),
        Field("ring_bytes", "u64", "size of the whole ring"),
        Field("fingerprint", "u8", "SHA-256 of the model", 32),
        Field("slots_per_lane", "u32", "slots, doorbells and cancel words of a lane"),
        Field("log_entries", "u32", "token log entries of a lane"),
        Field("arena_bytes", "u64", "bytes of a lane's arena"),
        Field("vocabulary_size", "u32", "token ids are below this"),
        Field("max_context_tokens", "u32", "prompt and output together"),
        Field("max_top_logprobs", "u32", "MAX_TOP_LOGPROBS of the engine"),
        Field("reserved", "u32", "zero"),
        Field("lane_status_offset", "u64", "of LaneStatus[0] in the ring"),
        Field("inbound_offset", "u64", "of lane 0's inbound area in the ring"),
        Field("inbound_stride", "u64", "bytes between two lanes' inbound areas"),
        Field("doorbells_offset", "u64", "in an inbound area"),
        Field("cancels_offset", "u64", "in an inbound area"),
        Field("arena_offset", "u64", "in an inbound area"),
        Field("outbound_offset", "u64", "of lane 0's outbound area in the ring"),
        Field("outbound_stride", "u64", "bytes between two lanes' outbound areas"),
        Field("slot_status_offset", "u64", "in an outbound area"),
        Field("log_offset", "u64", "in an outbound area"),
    ),
)

BOOTSTRAP_CONTROL = Struct(
    "BootstrapControl",
    Writer.BOOTSTRAP,
    "Orders to the control loop.",
    64,
    (Field("command", "u64", "Command"),),
)

ENGINE_STATUS = Struct(
    "EngineStatus",
    Writer.ENGINE,
    "Liveness: read by every gateway and probe.",
    64,
    (
        Field("epoch", "u64", "differs for every start of the engine; never 0"),
        Field("state", "u64", "EngineState"),
        Field("heartbeat", "u64", "grows while the control loop lives, idle or not"),
        Field("steps", "u64", "steps committed: grows while there is progress"),
        Field("failure", "u64", "why state is FAILED: a CUDA error code; 0 for none or another cause"),
    ),
)

ENGINE_COUNTERS = Struct(
    "EngineCounters",
    Writer.ENGINE,
    "For metrics; refreshed once a step.",
    256,
    (
        Field("prompt_tokens", "u64", "prompt tokens computed, recomputed ones not counted twice"),
        Field("generated_tokens", "u64", "tokens published"),
        Field("preemptions", "u64", "sequences sent back to the queue"),
        Field("step_time_us", "u64", "time spent in steps"),
        Field("finished", "u64", "requests ended, by FinishReason", 8),
        Field("running", "u32", "sequences that hold KV pages"),
        Field("waiting", "u32", "sequences in the queue"),
        Field("kv_pages_total", "u32", "pages of the KV cache"),
        Field("kv_pages_free", "u32", "pages held by no sequence, those that the prefix cache keeps among them"),
        Field("prefix_cache_queries", "u64", "prompt tokens looked for in the prefix cache, once a request"),
        Field("prefix_cache_hits", "u64", "of them found: their pages were not computed again"),
    ),
)

LANE_STATUS = Struct(
    "LaneStatus",
    Writer.ENGINE,
    "One lane's summary, beside the header so that every gateway may read it.",
    64,
    (
        Field("generated_tokens", "u64", "tokens published to this lane"),
        Field("phase", "u32", "LanePhase"),
        Field("running", "u32", "sequences of this lane that hold KV pages"),
        Field("waiting", "u32", "sequences of this lane in the queue"),
        Field("rejected", "u32", "submissions refused"),
        Field("log_backlog", "u32", "log entries not yet acknowledged"),
        Field("reserved", "u32", "zero"),
    ),
)

LANE_INBOUND = Struct(
    "LaneInbound",
    Writer.GATEWAY,
    "Head of a lane's inbound area.",
    64,
    (
        Field("gateway_epoch", "u64", "who owns the lane; 0 gives it up; written after all else is reset"),
        Field("lease", "u64", "any change renews the lease"),
        Field(
            "log_tail",
            "u64",
            "log entries consumed since the lane's first; acknowledges the slots that ended; the engine ignores one "
            "outside attach_log_head..log_head or behind the last",
        ),
    ),
)

DESCRIPTOR = Struct(
    "Descriptor",
    Writer.GATEWAY,
    "One request. Heads an arena record: Descriptor, prompt token ids (u32), room for max_tokens more ids.",
    192,
    (
        Field("request_id", "u64", "for logs and traces only"),
        Field("seed", "u64", "of the sampling"),
        Field("slot", "u32", "in the lane"),
        Field("prompt_tokens", "u32", "ids that follow this descriptor"),
        Field("max_tokens", "u32", "at least 1"),
        Field("min_tokens", "u32", "at most max_tokens"),
        Field("priority", "i32", "MIN_PRIORITY to MAX_PRIORITY, higher goes first"),
        Field("time_limit_ms", "u32", "from submission; 0 for none"),
        Field("flags", "u32", "DescriptorFlag"),
        Field("top_logprobs", "u32", "0 to MAX_TOP_LOGPROBS"),
        Field("temperature", "f32", "0 is greedy"),
        Field("top_p", "f32", "in (0, 1]"),
        Field("min_p", "f32", "in [0, 1]"),
        Field("repetition_penalty", "f32", "above 0; 1 for none"),
        Field("presence_penalty", "f32", "0 for none"),
        Field("frequency_penalty", "f32", "0 for none"),
        Field("top_k", "u32", "0 for all"),
        Field("stop_token_count", "u32", "used entries of stop_tokens"),
        Field("stop_tokens", "u32", "end the request beside the model's own", MAX_STOP_TOKENS),
        Field("cache_salt", "u64", "requests of the same salt share cached prefixes", 2),
    ),
)

LANE_OUTBOUND = Struct(
    "LaneOutbound",
    Writer.ENGINE,
    "Head of a lane's outbound area: all that a gateway polls, in one line.",
    64,
    (
        Field("attached_epoch", "u64", "the gateway epoch that is served; 0 when the lane is free"),
        Field("log_head", "u64", "log entries published since the lane's first"),
        Field(
            "next_position",
            "u64",
            "of the doorbell that the engine expects next; every attach skips slots_per_lane positions, so that no "
            "doorbell, cancel or log tag of a previous owner can match",
        ),
        Field("attach_log_head", "u64", "log_head when attached_epoch was last set"),
    ),
)

LOG_ENTRY = Struct(
    "LogEntry",
    Writer.ENGINE,
    "One entry of the token log.",
    16,
    (
        Field("tag", "u32", "submission_tag of the submission's position"),
        Field("slot", "u16", "in the lane"),
        Field("kind", "u8", "LogKind"),
        Field("detail", "u8", "by kind"),
        Field("token", "u32", "by kind"),
        Field("value", "f32", "by kind"),
    ),
)

STRUCTS = (
    RING_INFO,
    BOOTSTRAP_CONTROL,
    ENGINE_STATUS,
    ENGINE_COUNTERS,
    LANE_STATUS,
    LANE_INBOUND,
    DESCRIPTOR,
    LANE_OUTBOUND,
    LOG_ENTRY,
)
ENUMS: tuple[type[enum.IntEnum] | type[enum.IntFlag], ...] = (
    EngineState,
    Command,
    LanePhase,
    SlotPhase,
    LogKind,
    FinishReason,
    RejectCode,
    DescriptorFlag,
)

HEADER_STRUCTS = (RING_INFO, BOOTSTRAP_CONTROL, ENGINE_STATUS, ENGINE_COUNTERS)


def header_offset(struct: Struct) -> int:
    """Byte offset of one of the header's structs in the ring."""
    offset = 0
    for candidate in HEADER_STRUCTS:
        if candidate is struct:
            return offset
        offset += candidate.size
    raise ValueError(f"{struct.name} is not part of the header")


def _layout_hash() -> int:
    text = "|".join(
        f"{struct.name}:{struct.size}:{offset}:{field.name}:{field.type}:{field.count}"
        for struct in STRUCTS
        for offset, field in struct.offsets()
    )
    text += "|".join(f"{kind.__name__}.{member.name}={member.value}" for kind in ENUMS for member in kind)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


LAYOUT_HASH = _layout_hash()


def doorbell_word(position: int, record_offset: int) -> int:
    """The 64-bit flag of a submission: its tag above the record's offset in the arena, counted in lines.

    ``position`` counts the lane's submissions from the engine's start, over all gateways that owned the lane; the
    word goes to doorbell ``position % slots_per_lane``.
    """
    return submission_tag(position) << 32 | record_offset // LINE_BYTES


def submission_tag(position: int) -> int:
    """The 32 bits that mark a submission's doorbell and log entries: 1 to 2**32 - 1.

    Never 0, so that a doorbell that was reset to 0 can't be mistaken for a submission at any position.
    """
    return position % 0xFFFF_FFFF + 1


def slot_status_word(tag: int, phase: SlotPhase, reason: FinishReason) -> int:
    """A slot's outbound status: tag of its latest submission, phase, and how the last one ended."""
    return tag << 32 | phase << 16 | reason


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


@dataclass(frozen=True)
class RingGeometry:
    """Sizes of one ring, and where everything lies in it (bytes from the ring's start)."""

    lanes: int
    slots_per_lane: int
    arena_bytes: int
    log_entries: int

    def __post_init__(self) -> None:
        limits = {
            "lanes": (self.lanes, 1, 256),
            "slots_per_lane": (self.slots_per_lane, 1, 4096),
            "arena_bytes": (self.arena_bytes, 4 * LINE_BYTES, 1 << 37),
            # an admitted, a finish and one token with its alternatives for each slot must fit
            "log_entries": (self.log_entries, 4 * self.slots_per_lane + MAX_TOP_LOGPROBS + 1, 1 << 31),
        }
        for name, (value, low, high) in limits.items():
            if not low <= value <= high:
                raise ValueError(f"ring {name} is {value}, must be {low} to {high}")
        if self.arena_bytes % LINE_BYTES:
            raise ValueError(f"ring arena_bytes is {self.arena_bytes}, must be a multiple of {LINE_BYTES}")

    @property
    def lane_status_offset(self) -> int:
        return sum(struct.size for struct in HEADER_STRUCTS)

    @property
    def inbound_offset(self) -> int:
        return _aligned(self.lane_status_offset + self.lanes * LANE_STATUS.size, AREA_ALIGNMENT)

    @property
    def doorbells_offset(self) -> int:
        return LANE_INBOUND.size

    @property
    def cancels_offset(self) -> int:
        return self.doorbells_offset + _aligned(8 * self.slots_per_lane, LINE_BYTES)

    @property
    def arena_offset(self) -> int:
        return self.cancels_offset + _aligned(8 * self.slots_per_lane, LINE_BYTES)

    @property
    def inbound_stride(self) -> int:
        return _aligned(self.arena_offset + self.arena_bytes, AREA_ALIGNMENT)

    @property
    def outbound_offset(self) -> int:
        return self.inbound_offset + self.lanes * self.inbound_stride

    @property
    def slot_status_offset(self) -> int:
        return LANE_OUTBOUND.size

    @property
    def log_offset(self) -> int:
        return self.slot_status_offset + _aligned(8 * self.slots_per_lane, LINE_BYTES)

    @property
    def outbound_stride(self) -> int:
        return _aligned(self.log_offset + LOG_ENTRY.size * self.log_entries, AREA_ALIGNMENT)

    @property
    def ring_bytes(self) -> int:
        return self.outbound_offset + self.lanes * self.outbound_stride

    def inbound(self, lane: int) -> int:
        return self.inbound_offset + lane * self.inbound_stride

    def doorbell(self, lane: int, position: int) -> int:
        return self.inbound(lane) + self.doorbells_offset + 8 * (position % self.slots_per_lane)

    def cancel(self, lane: int, slot: int) -> int:
        """Where the gateway writes ``position + 1`` of the submission it gives up (64 bits)."""
        return self.inbound(lane) + self.cancels_offset + 8 * slot

    def arena(self, lane: int) -> int:
        return self.inbound(lane) + self.arena_offset

    def outbound(self, lane: int) -> int:
        return self.outbound_offset + lane * self.outbound_stride

    def slot_status(self, lane: int) -> int:
        return self.outbound(lane) + self.slot_status_offset

    def log(self, lane: int) -> int:
        return self.outbound(lane) + self.log_offset


def record_bytes(prompt_tokens: int, max_tokens: int) -> int:
    """Bytes of arena that a request occupies, in whole lines.

    The room for max_tokens stays unwritten: the engine keeps each request's token history at the same offset of a
    private copy of the arena, so one allocation by the gateway serves both.
    """
    return _aligned(DESCRIPTOR.size + 4 * (prompt_tokens + max_tokens), LINE_BYTES)
