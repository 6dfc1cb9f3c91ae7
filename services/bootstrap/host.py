"""The bootstrap process: one start, one engine, one end."""

from __future__ import annotations

import threading
import time

from services.bootstrap.card import model_card
from services.bootstrap.engine import EngineBuilder, build_engine, require_engine
from services.bootstrap.errors import BootstrapError
from services.bootstrap.exports import VerbsExports
from services.bootstrap.handshake import Handshake, Offer
from services.bootstrap.lanes import LaneTable
from services.bootstrap.parking import STOP_SIGNALS, park, wait_until, wake_parked
from services.bootstrap.server import HandshakeServer
from services.bootstrap.settings import BootstrapSettings
from services.bootstrap.status import Progress, Pulse, StatusSocket
from services.bootstrap.store import ModelStore
from services.common.errors import BlinkError
from services.common.logging import get_logger
from services.common.runtime import status_path
from services.gpu_engine.models.checkpoint import Checkpoint
from services.gpu_engine.models.fp8_weights import Fp8Weights
from services.gpu_engine.models.loader import open_checkpoint
from services.ring.header import RingInfo, read_status
from services.ring.memory import MemoryTransport
from services.ring.parts import HostPart
from services.ring.schema import BOOTSTRAP_CONTROL, Command, EngineState, header_offset
from services.ring.shm import ShmRing
from services.ring.transport import Transport

STOP_SECONDS = 10.0  # for the control loop to leave after STOP
PROGRESS_SECONDS = 0.1  # between two progress events
MIN_PROMISE_SECONDS = 10.0  # a granted lane is kept this long for a gateway that has not attached yet

log = get_logger()


def main(settings: BootstrapSettings) -> int:
    """Run until SIGTERM or SIGINT, which drain; returns the exit code. Raises BlinkError when the start fails."""
    return serve(settings, build_engine)


def serve(settings: BootstrapSettings, build: EngineBuilder) -> int:
    """``main`` with a choice of engine."""
    require_engine(settings)
    checkpoint = open_checkpoint(ModelStore().resolve(settings.model))
    if settings.weights == "fp8":
        checkpoint = Fp8Weights(checkpoint)
    info = ring_info(settings, checkpoint)
    with ShmRing.create(settings.ring_path, info) as ring:
        return Host(settings, checkpoint, ring, info, build).run()


def ring_info(settings: BootstrapSettings, checkpoint: Checkpoint) -> RingInfo:
    """The ring for this model. Raises BootstrapError when settings and model do not fit each other."""
    longest = checkpoint.config.context
    context = settings.max_context_tokens or longest
    if context > longest:
        raise BootstrapError(f"max_context_tokens is {context}, the model's limit is {longest}")
    context = min(context, settings.kv_tokens)  # a longer request could never run
    try:
        geometry = settings.geometry(context)
    except ValueError as error:
        raise BootstrapError(str(error)) from error
    return RingInfo(
        geometry=geometry,
        fingerprint=bytes.fromhex(checkpoint.fingerprint),
        vocabulary_size=checkpoint.config.vocabulary,
        max_context_tokens=context,
    )


class Host:
    """The engine's thread, the handshake's thread, and the main thread that is parked between start and end."""

    def __init__(
        self,
        settings: BootstrapSettings,
        checkpoint: Checkpoint,
        ring: ShmRing,
        info: RingInfo,
        build: EngineBuilder,
    ) -> None:
        self._settings = settings
        self._checkpoint = checkpoint
        self._ring = ring
        self._info = info
        self._build = build
        self._transport: Transport = MemoryTransport(ring.region)
        self._epoch = time.time_ns()
        self._handshake = Handshake()
        self._exports = (
            VerbsExports(settings, [HostPart(0, ring.region)], info.geometry) if settings.transport == "verbs" else None
        )
        self._engine_progress = Progress()
        status = StatusSocket(status_path(settings.instance), self._pulse)
        self._server = HandshakeServer(settings.address, self._handshake, settings.tls, status)
        self._engine = threading.Thread(target=self._run_engine, name="engine", daemon=True)
        self._ready = False
        self._failure: BaseException | None = None
        self._progress_at = 0.0
        self._stage = ""

    def run(self) -> int:
        """Start, park, stop. Raises BlinkError when the engine can't start or has ended by itself."""
        self._server.start()
        try:
            self._engine.start()
            signal_number = park()
            if signal_number in STOP_SIGNALS:
                return self._stop()
            self._engine.join()
            if isinstance(self._failure, BlinkError):
                raise self._failure
            raise BootstrapError(f"the engine's control loop ended: {self._failure!r}") from self._failure
        finally:
            self._server.stop()
            if self._exports is not None:
                self._exports.close()

    def _run_engine(self) -> None:
        """The engine's thread, from loading to the end of its control loop."""
        started = time.monotonic()
        try:
            engine = self._build(
                self._settings,
                self._checkpoint,
                self._info,
                epoch=self._epoch,
                region=self._ring.region,
                progress=self._progress,
            )
            if engine.ring is not None:
                self._transport = engine.ring.transport
                if self._exports is not None:
                    self._exports.parts = engine.ring.parts
            engine.run(lambda: self._publish(time.monotonic() - started))
        except BaseException as error:  # the main thread reports it
            self._failure = error
        finally:
            wake_parked()

    def _publish(self, seconds: float) -> None:
        """The engine is READY: gateways may attach."""
        settings = self._settings
        card = model_card(self._model_name(), self._checkpoint)
        promise = max(MIN_PROMISE_SECONDS, settings.lease_timeout_ms / 1000)
        lanes = LaneTable(settings.lanes, promise, per_certificate=settings.lanes_per_certificate)
        self._handshake.publish(
            Offer(
                self._epoch, self._ring.path, card, settings.lease_timeout_ms, lanes, self._lane_phases, self._exports
            )
        )
        self._ready = True
        log.info(
            "ready",
            model=card.name,
            engine=settings.engine,
            address=self._server.address,
            transport=settings.transport,
            ring=str(self._ring.path),
            ring_bytes=self._info.geometry.ring_bytes,
            max_context_tokens=self._info.max_context_tokens,
            engine_epoch=self._epoch,
            seconds=round(seconds, 3),
        )

    def _model_name(self) -> str:
        """A known model's name as it is; of a path the last part, without .gguf."""
        return self._settings.model.rstrip("/").rsplit("/", maxsplit=1)[-1].removesuffix(".gguf")

    def _lane_phases(self) -> list[int]:
        return [int(phase) for phase in read_status(self._transport, self._info.geometry).lanes["phase"]]

    def _pulse(self) -> Pulse:
        return self._engine_progress.look(read_status(self._transport, self._info.geometry))

    def _progress(self, stage: str, done: int, total: int) -> None:
        """Log loading's progress: every stage's begin and end, and a few events between."""
        now = time.monotonic()
        if stage != self._stage or done >= total or now - self._progress_at >= PROGRESS_SECONDS:
            self._stage, self._progress_at = stage, now
            log.info("loading", stage=stage, done=done, total=total)

    def _stop(self) -> int:
        """DRAIN within the limit, then STOP; a second signal skips the rest of the drain."""
        if not self._ready:  # nobody waits for what is half loaded; the thread ends with the process
            log.info("stopped")
            return 0
        log.info("draining", requests=self._requests(), limit_seconds=self._settings.drain_seconds)
        self._handshake.withdraw("the engine is draining")
        self._order(Command.DRAIN)
        if not wait_until(self._drained, self._settings.drain_seconds):
            log.warning("drain_limit_reached", requests=self._requests())
        self._order(Command.STOP)
        if not wait_until(lambda: not self._engine.is_alive(), STOP_SECONDS):
            log.error("engine_does_not_stop", seconds=STOP_SECONDS)
            return 1
        if self._failure is not None:
            raise BootstrapError(f"the engine failed while it drained: {self._failure!r}") from self._failure
        log.info("stopped")
        return 0

    def _order(self, command: Command) -> None:
        self._transport.write(header_offset(BOOTSTRAP_CONTROL), command.to_bytes(8, "little"), flag=True)

    def _drained(self) -> bool:
        """The engine has seen the order and holds no request any more, or it has ended."""
        if not self._engine.is_alive():
            return True
        state = int(read_status(self._transport, self._info.geometry).engine["state"])
        return state != EngineState.READY and not self._requests()

    def _requests(self) -> int:
        """Requests that the engine holds."""
        counters = read_status(self._transport, self._info.geometry).counters
        return int(counters["running"]) + int(counters["waiting"])
