"""A cuda engine with random weights in a process of its own: ``python -m bench.engine_process SPEC``, SPEC in JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.families import MODELS, RandomWeights
from bench.step_times import StepTimes
from services.common.cpu import on_cpus
from services.common.logging import configure_logging
from services.common.process import PARENT_VARIABLE, stop_with_parent
from services.gpu_engine.cuda.assemble import SchedulerPlace, assemble
from services.gpu_engine.cuda.driver import Device
from services.gpu_engine.engine import EngineLimits
from services.gpu_engine.models.config import ModelConfig
from services.ring import _atomics, schema
from services.ring.header import RingInfo
from services.ring.memory import Region
from services.ring.schema import Command, RingGeometry
from services.ring.shm import ShmRing

COMMAND = schema.header_offset(schema.BOOTSTRAP_CONTROL)
_LLAMA: dict[str, Any] = {"architecture": "llama", "head_dim": 64, "norm_eps": 1e-5, "rope_base": 100_000.0}
_LLAMA |= {"rope_scaling": None, "context": 8192, "tied_embeddings": True, "eos_ids": (0,)}
SMALL_MODELS = {
    "smollm2-135m": ModelConfig(**_LLAMA, layers=30, hidden=576, heads=9, kv_heads=3, ffn=1536, vocabulary=49_152),
    "tiny": ModelConfig(**_LLAMA, layers=2, hidden=256, heads=4, kv_heads=2, ffn=512, vocabulary=2048),
}


@dataclass(frozen=True)
class EngineSpec:
    """What to run.

    Attributes:
        model: name of MODELS or SMALL_MODELS.
        geometry: of the ring.
        loop_cpu: of the host-driven loop's thread; -1 for any.
    """

    model: str
    scheduler: SchedulerPlace
    geometry: RingGeometry
    limits: EngineLimits
    loop_cpu: int = -1

    @property
    def config(self) -> ModelConfig:
        return (MODELS | SMALL_MODELS)[self.model]


@dataclass
class EngineProcess:
    """A running engine.

    Attributes:
        region: its ring.
        gpu: the GPU's name.
        audit: after the end: what the scheduling core still holds (``CoreAudit``'s fields).
    """

    process: subprocess.Popen[str]
    region: Region
    folder: Path
    gpu: str
    audit: dict[str, int]

    def times(self) -> Any:
        """The steps' times (``StepTimes.read``); only after the end."""
        return np.load(self.folder / "times.npy")

    def order(self, command: Command) -> None:
        _atomics.store_release(self.region, COMMAND, command)

    def stop(self) -> None:
        """STOP and wait. Raises RuntimeError when the engine ends in another way."""
        self.order(Command.STOP)
        output = self.process.communicate(timeout=60)[0]
        if self.process.returncode != 0:
            raise RuntimeError(f"the engine ended with exit code {self.process.returncode}")
        self.audit = json.loads(output)

    def move_threads(self, cpu: int, cpus: Collection[int]) -> None:
        """Move what is bound to ``cpu``: the loop's thread, and what it has started."""
        tasks = [int(task.name) for task in Path(f"/proc/{self.process.pid}/task").iterdir()]
        moved = [task for task in tasks if os.sched_getaffinity(task) == {cpu}]
        if not moved:
            raise RuntimeError(f"no thread of the engine is bound to CPU {cpu}, the loop's should be")
        for task in moved:
            os.sched_setaffinity(task, cpus)


@contextmanager
def engine_process(spec: EngineSpec, cpus: Collection[int] | None = None) -> Iterator[EngineProcess]:
    """An engine on ``cpus`` that is READY; ended on leaving, by force if ``stop`` was not called."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        command = [sys.executable, "-m", "bench.engine_process", json.dumps(asdict(spec)), folder]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", PARENT_VARIABLE: str(os.getpid())}
        with on_cpus(cpus or os.sched_getaffinity(0)):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the engine did not start: exit code {process.wait()}")
            region = np.frombuffer(np.memmap(Path(folder) / "ring", np.uint8, "r+"), np.uint8)
            yield EngineProcess(process, region, Path(folder), json.loads(line)["gpu"], {})
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()


def serve(spec: EngineSpec, folder: Path) -> None:
    """Make the ring, load, serve until STOP. One line of JSON says READY, another one what is left at the end."""
    info = RingInfo(spec.geometry, bytes(32), spec.config.vocabulary, spec.limits.context)
    with ShmRing.create(folder / "ring", info) as shm:
        device, times = Device(), StepTimes()
        engine = assemble(
            RandomWeights(spec.config),
            shm.region,
            spec.limits,
            epoch=time.time_ns(),
            progress=lambda *_: None,
            scheduler=spec.scheduler,
            around=times.around,
        )
        with on_cpus(os.sched_getaffinity(0) if spec.loop_cpu < 0 else {spec.loop_cpu}):
            engine.start()  # the host-driven loop's thread begins here
        print(json.dumps({"gpu": device.name}), flush=True)
        engine.wait()
        np.save(folder / "times.npy", times.read())
        print(json.dumps(asdict(engine.loop.audit())), flush=True)


def main() -> None:
    configure_logging("engine", log_format="console")  # to stderr: what this process prints is read
    stop_with_parent()  # its control loop would hold a part of the GPU for ever
    fields: dict[str, Any] = json.loads(sys.argv[1])
    geometry, limits = RingGeometry(**fields.pop("geometry")), EngineLimits(**fields.pop("limits"))
    serve(EngineSpec(**fields, geometry=geometry, limits=limits), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
