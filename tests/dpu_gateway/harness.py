"""A whole gateway in one process: shared-memory ring, stand-in engine in a thread, real gRPC over unix sockets."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from blink.v1 import bootstrap_pb2, bootstrap_pb2_grpc, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from grpc_health.v1 import health_pb2

from services.dpu_gateway.session import Session
from services.dpu_gateway.settings import GatewaySettings
from services.dpu_gateway.worker import Worker
from services.ring import _atomics
from services.ring.header import RingInfo
from services.ring.schema import (
    ABI_VERSION,
    BOOTSTRAP_CONTROL,
    LAYOUT_HASH,
    Command,
    RingGeometry,
    header_offset,
)
from services.ring.shm import ShmRing
from tests.dpu_gateway.small_tokenizer import byte_level_tokenizer
from tests.dpu_gateway.test_chat import CHATML
from tests.support.stand_in_engine import FINGERPRINT, Behaviour, StandInEngine

MODEL = "small"
EOS = "<|end|>"
LEASE_TIMEOUT_MS = 3_000
EPOCHS = itertools.count(1)

Event = inference_pb2.GenerateResponse


def ring_info(**geometry: int) -> RingInfo:
    sizes = {"lanes": 2, "slots_per_lane": 8, "arena_bytes": 1 << 18, "log_entries": 1024} | geometry
    return RingInfo(RingGeometry(**sizes), FINGERPRINT, vocabulary_size=640, max_context_tokens=2048)


def model_card(chat_template: str = CHATML, unencodable_bytes: bytes = b"") -> bootstrap_pb2.ModelCard:
    tokenizer = byte_level_tokenizer()
    return bootstrap_pb2.ModelCard(
        name=MODEL,
        architecture="llama",
        fingerprint=FINGERPRINT.hex(),
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=chat_template,
        eos_token=EOS,
        eos_token_ids=[tokenizer.token_to_id(EOS)],  # type: ignore[list-item]
        unencodable_bytes=unencodable_bytes,
    )


class Bootstrap(bootstrap_pb2_grpc.BootstrapServicer):
    """Grants lanes of whichever ring is current, as the handshake asks; UNAVAILABLE while there is none."""

    def __init__(self, card: bootstrap_pb2.ModelCard) -> None:
        self.card = card
        self.ring: ShmRing | None = None
        self.engine: StandInEngine | None = None
        self.lease_timeout_ms = LEASE_TIMEOUT_MS
        self._lanes: dict[str, int] = {}

    async def Attach(
        self,
        request: bootstrap_pb2.AttachRequest,
        context: grpc.aio.ServicerContext[bootstrap_pb2.AttachRequest, bootstrap_pb2.AttachResponse],
    ) -> bootstrap_pb2.AttachResponse:
        if self.ring is None or self.engine is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is not ready")
        return bootstrap_pb2.AttachResponse(
            lane=self._lanes.setdefault(request.gateway_id, len(self._lanes)),
            gateway_epoch=next(EPOCHS),
            engine_epoch=self.engine.epoch,
            shm=bootstrap_pb2.ShmDescriptor(path=str(self.ring.path)),
            model=self.card,
            lease_timeout_ms=self.lease_timeout_ms,
            abi_version=ABI_VERSION,
            layout_hash=LAYOUT_HASH,
        )


@dataclass
class Gateway:
    """Everything of one test, and the client's stubs to the first worker."""

    directory: Path
    bootstrap: Bootstrap
    settings: dict[str, Any]
    workers: list[Worker] = field(default_factory=list)
    channels: list[grpc.aio.Channel] = field(default_factory=list)

    @property
    def engine(self) -> StandInEngine:
        assert self.bootstrap.engine is not None
        return self.bootstrap.engine

    @property
    def behaviour(self) -> Behaviour:
        return self.engine.behaviour

    @property
    def session(self) -> Session:
        """The first worker's."""
        session = self.workers[0].link.session
        assert session is not None
        return session

    def channel(self, worker: int = 0) -> grpc.aio.Channel:
        return self.channels[worker]

    def inference(self, worker: int = 0) -> inference_pb2_grpc.InferenceAsyncStub:
        return inference_pb2_grpc.InferenceStub(self.channel(worker))

    def control(self, worker: int = 0) -> control_pb2_grpc.ControlAsyncStub:
        return control_pb2_grpc.ControlStub(self.channel(worker))

    def http_socket(self, worker: int = 0) -> Path:
        return self.directory / f"http-{worker}.sock"

    async def health(self, name: str = "") -> int:
        check: grpc.aio.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
        check = self.channel().unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        return (await check(health_pb2.HealthCheckRequest(service=name))).status

    async def start_engine(self, info: RingInfo, behaviour: Behaviour) -> None:
        ring = ShmRing.create(self.directory / "ring", info)
        engine = StandInEngine(ring.region, behaviour)
        engine.start()
        self.bootstrap.ring, self.bootstrap.engine = ring, engine

    def order(self, command: Command) -> None:
        """What bootstrap orders the control loop to do."""
        assert self.bootstrap.ring is not None
        _atomics.store_release(self.bootstrap.ring.region, header_offset(BOOTSTRAP_CONTROL), command)

    async def kill_engine(self) -> None:
        """As if its process was killed: heartbeat and tokens stop, the ring's file is gone, the handshake refuses."""
        engine, ring = self.engine, self.bootstrap.ring
        assert ring is not None
        self.bootstrap.ring = self.bootstrap.engine = None
        await asyncio.to_thread(engine.die)
        ring.close()

    async def start_worker(self) -> Worker:
        number = len(self.workers)
        address = f"unix:{self.directory / f'api-{number}.sock'}"
        places = {"listen": address, "http_listen": f"unix:{self.http_socket(number)}"}
        settings = GatewaySettings(
            worker=number,
            bootstrap=f"unix:{self.directory / 'bootstrap.sock'}",
            **{"encode_threads": 1, "reattach_delay": 0.05, "watch_interval": 0.02, "drain_limit": 5.0}
            | places
            | self.settings,
        )
        worker = Worker(settings, self.directory)
        await worker.start()
        self.workers.append(worker)
        listen = settings.listen
        target = listen if listen.startswith("unix:") else f"127.0.0.1:{worker.port}"
        self.channels.append(grpc.aio.insecure_channel(target))
        return worker


@asynccontextmanager
async def gateway(
    behaviour: Behaviour | None = None,
    info: RingInfo | None = None,
    *,
    workers: int = 1,
    card: bootstrap_pb2.ModelCard | None = None,
    lease_timeout_ms: int = LEASE_TIMEOUT_MS,
    **settings: Any,
) -> AsyncIterator[Gateway]:
    """Running and attached; afterwards everything is stopped and removed."""
    directory = Path(tempfile.mkdtemp(prefix="blink-"))  # short: a unix socket's path has 107 bytes
    system = Gateway(directory, Bootstrap(card or model_card()), settings)
    system.bootstrap.lease_timeout_ms = lease_timeout_ms
    server = grpc.aio.server()
    bootstrap_pb2_grpc.add_BootstrapServicer_to_server(system.bootstrap, server)
    server.add_insecure_port(f"unix:{directory / 'bootstrap.sock'}")
    await server.start()
    try:
        await system.start_engine(info or ring_info(), behaviour or Behaviour())
        for _ in range(workers):
            await system.start_worker()
        await until(lambda: all(worker.link.session is not None for worker in system.workers))
        yield system
    finally:
        for channel in system.channels:
            await channel.close()
        for worker in system.workers:
            await worker.drain()
        if system.bootstrap.engine is not None:
            await system.kill_engine()
        await server.stop(0)
        shutil.rmtree(directory)


async def until(condition: Callable[[], bool]) -> None:
    """Return once ``condition`` holds; fails when it does not come to hold."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the engine's thread has no event to wait for
            await asyncio.sleep(0.005)


@dataclass
class Result:
    """One stream, whole."""

    events: list[Event] = field(default_factory=list)
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    error: grpc.aio.AioRpcError | None = None

    @property
    def text(self) -> str:
        return "".join(event.chunk.text + event.finished.text for event in self.events)

    @property
    def ids(self) -> list[int]:
        return [index for event in self.events for index in event.chunk.token_ids]

    @property
    def finished(self) -> inference_pb2.Finished:
        assert self.events, self.details
        assert self.events[-1].WhichOneof("event") == "finished", self
        return self.events[-1].finished

    @property
    def accepted(self) -> inference_pb2.Accepted:
        assert self.events, self.details
        assert self.events[0].WhichOneof("event") == "accepted"
        return self.events[0].accepted


async def collect(call: AsyncIterable[Event]) -> Result:
    """Read a stream to its end, whatever that is."""
    result = Result()
    try:
        async for event in call:
            result.events.append(event)
    except grpc.aio.AioRpcError as error:
        result.code, result.details, result.error = error.code(), error.details() or "", error
    return result


def text_request(text: str = "The quick brown fox", **fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text=text, **fields)


def max_tokens(count: int, **fields: Any) -> inference_pb2.StopConditions:
    return inference_pb2.StopConditions(max_tokens=count, **fields)
