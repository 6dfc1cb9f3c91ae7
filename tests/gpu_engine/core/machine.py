"""A whole engine without a model: scheduling core, gateways' lanes, and an executor whose KV cache holds token ids.

The executor samples a function of what it reads back from the KV cache through the page table, so a page that is
shared, lost or stale, or a position computed twice or never, changes the tokens that a request gets.

It also keeps which positions have *other bits*: those that a row of one token computed, as a GPU does it, and all that
read such ones. With ``rounds`` they change the tokens, too.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.gpu_engine.core._core import Scheduler, SchedulerConfig
from services.ring import dtypes, schema
from services.ring.header import RingInfo, format_ring
from services.ring.lane import LaneClient
from services.ring.memory import MemoryTransport, Region, allocate_region
from services.ring.parts import HostPart, RingParts
from services.ring.record import pack_record
from services.ring.schema import FinishReason, LogKind, RejectCode, RingGeometry
from services.ring.transport import Transport
from tests.support.parted_ring import PartedTransport

VOCABULARY = 211
EOS = 3
UNWRITTEN = -1


def next_token(history: npt.NDArray[np.int32], seed: int) -> int:
    """What the pretended model samples after ``history``: any token may come, EOS about once in 200."""
    return zlib.crc32(np.ascontiguousarray(history, np.int32).tobytes(), seed & 0xFFFF_FFFF) % VOCABULARY


@dataclass
class Stream:
    """What one submission's gateway has seen."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[list[int]] = field(default_factory=list)
    admitted: int = 0
    cached_tokens: int = 0
    reason: FinishReason | None = None
    code: RejectCode | None = None
    pending: list[int] = field(default_factory=list)

    def take(self, entry: np.void) -> None:
        assert self.reason is None, f"an entry after FINISH: {entry}"
        kind = LogKind(int(entry["kind"]))
        if kind is LogKind.FINISH:
            self.reason = FinishReason(int(entry["detail"]))
            self.code = RejectCode(int(entry["token"]))
        elif kind is LogKind.ADMITTED:
            assert not self.tokens
            self.admitted += 1
            self.cached_tokens = int(entry["token"])
            assert self.admitted == 1
        elif kind is LogKind.TOP_LOGPROB:
            self.pending.append(int(entry["token"]))
        else:
            assert self.admitted == 1
            self.tokens.append(int(entry["token"]))
            self.logprobs.append(float(entry["value"]))
            self.alternatives.append(self.pending)
            self.pending = []


class Gateway:
    """A lane's gateway that puts each record where it is told and reads every stream."""

    def __init__(self, ring: Region | Transport, geometry: RingGeometry, lane: int, epoch: int) -> None:
        self.client = LaneClient(
            ring if isinstance(ring, Transport) else MemoryTransport(ring),
            geometry,
            lane,
            gateway_epoch=epoch,
            lease_timeout=1e9,
            clock=lambda: 0.0,
        )
        self.streams: dict[int, Stream] = {}  # by tag
        self.client.begin_attach()

    def submit(self, record: bytes, offset: int) -> int:
        """Returns the submission's position."""
        position = self.client.submit(record, offset)
        self.streams[schema.submission_tag(position)] = Stream()
        return position

    def stream(self, position: int) -> Stream:
        return self.streams[schema.submission_tag(position)]

    def read(self) -> None:
        self.client.poll()
        for entry in self.client.read_log():
            self.streams[int(entry["tag"])].take(entry)
        self.client.acknowledge(now=True)


class Machine:
    """Time is in microseconds and passes only by ``tick``."""

    def __init__(
        self,
        *,
        lanes: int = 1,
        slots: int = 8,
        arena_bytes: int = 1 << 14,
        log_entries: int = 256,
        max_context: int = 64,
        page_size: int = 4,
        page_count: int = 64,
        max_running: int = 8,
        max_batched_tokens: int = 16,
        max_waiting: int = 1024,
        priority_boost: int = 4,
        lease_us: int = 1_000_000,
        first_position: int = 0,
        threads: int = 1,
        prefix_cache: bool = False,
        share_decoded: bool = False,
        rounds: bool = False,
        split: bool = False,
    ) -> None:
        """``split`` puts the lanes' outbound areas into memory of their own."""
        self.geometry = RingGeometry(lanes, slots, arena_bytes, log_entries)
        self.region = allocate_region(self.geometry.ring_bytes)
        format_ring(self.region, RingInfo(self.geometry, bytes(32), VOCABULARY, max_context))
        config = SchedulerConfig(
            page_size=page_size,
            page_count=page_count,
            max_running=max_running,
            max_batched_tokens=max_batched_tokens,
            max_waiting=max_waiting,
            priority_boost=priority_boost,
            lease_us=lease_us,
            prefix_cache=prefix_cache,
            share_decoded=share_decoded,
            eos_token_ids=[EOS],
        )
        self.config = config
        start = self.geometry.outbound_offset
        outbound = allocate_region(self.geometry.ring_bytes - start) if split else None
        self.parts: RingParts = [HostPart(0, self.region)]
        self.transport: Transport = MemoryTransport(self.region)
        if outbound is not None:
            self.parts = [HostPart(0, self.region[:start]), HostPart(start, outbound)]
            self.transport = PartedTransport(MemoryTransport(self.region[:start]), MemoryTransport(outbound))
        self.scheduler = Scheduler(
            self.region, config, first_position=first_position, threads=threads, outbound=outbound
        )
        self.scheduler.start(epoch=17)
        self.scheduler.set_state(schema.EngineState.READY)
        self.now_us = 1_000
        self.cache = np.full(page_count * page_size, UNWRITTEN, np.int32)
        self.other_bits = np.zeros(page_count * page_size, np.bool_)
        self.rounds = rounds
        self.epochs = 100
        self.batch_sizes: list[int] = []

    # The gateways' side

    def attach(self, lane: int = 0) -> Gateway:
        self.epochs += 1
        gateway = Gateway(self.transport, self.geometry, lane, self.epochs)
        self.poll()
        assert gateway.client.attached()
        return gateway

    def set_command(self, command: schema.Command) -> None:
        offset = schema.header_offset(schema.BOOTSTRAP_CONTROL)
        self.region[offset : offset + 8] = np.frombuffer(int(command).to_bytes(8, "little"), np.uint8)

    # The engine's side

    def poll(self) -> None:
        self.scheduler.poll(self.now_us)

    def plan(self) -> bool:
        planned = self.scheduler.plan(self.now_us)
        if planned:
            self.batch_sizes.append(self.scheduler.step.tokens)
        return planned

    def commit(self) -> None:
        tokens = self.execute()
        samples = tokens.size
        tops = (tokens[:, None] + np.arange(schema.MAX_TOP_LOGPROBS, dtype=np.int32)) % VOCABULARY
        self.scheduler.commit(
            self.now_us,
            tokens,
            (-tokens).astype(np.float32),
            tops.astype(np.int32),
            np.zeros((samples, schema.MAX_TOP_LOGPROBS), np.float32),
        )

    def execute(self) -> npt.NDArray[np.int32]:
        """Run the planned step on the pretended model."""
        step = self.scheduler.step
        assert 0 < step.tokens <= self.config.max_batched_tokens
        assert step.row_start[0] == 0
        assert step.row_start[-1] == step.tokens
        for row in range(step.rows):
            first, last = int(step.row_start[row]), int(step.row_start[row + 1])
            positions = step.positions[first:last]
            length = int(step.kv_length[row])
            assert np.array_equal(positions, np.arange(length - (last - first), length))
            places = self.places(row, length)
            self.cache[places[positions]] = step.token_ids[first:last]
            read = self.other_bits[places[: positions[0]]].any()
            self.other_bits[places[positions]] = read or last - first == 1
        sampled = np.zeros(step.samples, np.int32)
        for sample in range(step.samples):
            row, how = int(step.sample_row[sample]), step.sampling[sample]
            length = int(step.kv_length[row])
            places = self.places(row, length)
            seen = self.cache[places]
            start = int(how["history_offset"])
            assert length == how["history_length"]
            assert np.array_equal(seen, step.history[start : start + length].astype(np.int32))
            sampled[sample] = sample_token(seen + VOCABULARY * (self.rounds & self.other_bits[places]), how)
        return sampled

    def places(self, row: int, length: int) -> npt.NDArray[np.int64]:
        """[length]: where the row's positions lie in the cache."""
        step, size = self.scheduler.step, self.config.page_size
        pages = step.page_table[int(step.sequence[row])].astype(np.int64)
        positions = np.arange(length)
        found: npt.NDArray[np.int64] = pages[positions // size] * size + positions % size
        return found

    def step(self) -> bool:
        """Poll, plan, execute, commit. False when there was nothing to run."""
        self.tick()
        self.poll()
        if not self.plan():
            return False
        self.commit()
        return True

    def tick(self, microseconds: int = 100) -> None:
        self.now_us += microseconds

    # What must always hold

    def check_pages(self) -> None:
        owners = self.scheduler.page_owners()
        assert -2 not in owners, "a page is lost or held twice"
        assert owners.count(-1) == self.scheduler.free_pages
        size = self.config.page_size
        for page, tokens in self.scheduler.cached_prefixes():
            cells = slice(page * size, (page + 1) * size)
            assert self.cache[cells].tolist() == tokens[-size:], "a cached page holds other tokens than it says"
            assert self.config.share_decoded or not self.other_bits[cells].any(), "a cached page has other bits"

    def check_empty(self) -> None:
        """Everything is back where it was at the start."""
        assert self.scheduler.idle
        assert self.scheduler.free_pages == self.config.page_count
        assert self.scheduler.free_lines == self.config.max_running
        assert self.scheduler.held_arena_lines == 0
        assert self.scheduler.promised_log_entries == 0
        self.check_pages()

    def counters(self) -> np.void:
        offset = schema.header_offset(schema.ENGINE_COUNTERS)
        counters: np.void = self.region[offset : offset + schema.ENGINE_COUNTERS.size].view(dtypes.ENGINE_COUNTERS)[0]
        return counters

    def status(self) -> np.void:
        offset = schema.header_offset(schema.ENGINE_STATUS)
        status: np.void = self.region[offset : offset + schema.ENGINE_STATUS.size].view(dtypes.ENGINE_STATUS)[0]
        return status

    def lane_status(self, lane: int = 0) -> np.void:
        offset = self.geometry.lane_status_offset + lane * schema.LANE_STATUS.size
        status: np.void = self.region[offset : offset + schema.LANE_STATUS.size].view(dtypes.LANE_STATUS)[0]
        return status


def sample_token(history: npt.NDArray[np.int32], how: np.void) -> int:
    """``next_token``, and the one above it for as long as that must not be sampled."""
    token = next_token(history, int(how["seed"]))
    suppressed = set(how["suppress"][: int(how["suppress_count"])].tolist())
    while token in suppressed:
        token = (token + 1) % VOCABULARY
    return token


def expected_tokens(
    prompt: list[int],
    *,
    max_tokens: int,
    seed: int = 0,
    min_tokens: int = 0,
    ends: frozenset[int] = frozenset({EOS}),
    max_context: int = 64,
) -> tuple[list[int], FinishReason]:
    """The stream that a request must get, whatever else runs: a loop over one sequence."""
    history = list(prompt)
    while True:
        token = next_token(np.array(history, np.int32), seed)
        while len(history) - len(prompt) < min_tokens and token in ends:
            token = (token + 1) % VOCABULARY
        history.append(token)
        generated = history[len(prompt) :]
        if len(generated) > min_tokens and token in ends:
            return generated, FinishReason.STOP
        if len(generated) == max_tokens or len(history) == max_context:
            return generated, FinishReason.LENGTH


def record(prompt: list[int], *, slot: int = 0, max_tokens: int = 4, **fields: int | float | list[int]) -> bytes:
    """``pack_record`` for tests that vary one field."""
    return pack_record(prompt, slot=slot, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
