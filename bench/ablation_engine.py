"""The engine of bench/ablation.py, in a process of its own: ``python -m bench.ablation_engine``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.cpus import Cores, on_cpus
from bench.gpu_kernels import LLAMA_3_8B, RandomWeights
from bench.ring_load import LoadClient
from bench.step_times import StepTimes
from services.gpu_engine.cuda.assemble import SchedulerPlace, assemble
from services.gpu_engine.cuda.driver import Device
from services.gpu_engine.engine import EngineLimits
from services.gpu_engine.models.config import ModelConfig
from services.ring import _atomics, schema
from services.ring.header import RingInfo
from services.ring.schema import Command, RingGeometry, record_bytes
from services.ring.shm import ShmRing

PROMPT, GENERATED = (64, 256), 64
SLOTS = 256
LIMITS = EngineLimits(
    context=1024,
    page_size=16,
    kv_pages=8192,
    max_running=256,
    max_batched_tokens=2048,
    max_waiting=1024,
    lease_timeout_ms=600_000,
)
COMMAND = schema.header_offset(schema.BOOTSTRAP_CONTROL)
TINY = replace(
    LLAMA_3_8B, layers=4, hidden=512, heads=8, kv_heads=2, head_dim=64, ffn=1024, vocabulary=8192, eos_ids=(0,)
)


def model_of(tiny: bool) -> ModelConfig:
    return TINY if tiny else LLAMA_3_8B


def serve(ring: Path, scheduler: SchedulerPlace, model: ModelConfig, loop_cpu: int, times: Path) -> None:
    """Make the ring, load, serve until STOP; then write the steps' times. Says READY with one line of JSON."""
    arena = SLOTS * record_bytes(PROMPT[1], GENERATED)
    info = RingInfo(RingGeometry(1, SLOTS, arena, 1 << 14), bytes(32), model.vocabulary, LIMITS.context)
    with ShmRing.create(ring, info) as shm:
        device = Device()
        step_times = StepTimes()
        engine = assemble(
            RandomWeights(model),
            shm.region,
            LIMITS,
            epoch=time.time_ns(),
            progress=lambda *_: None,
            scheduler=scheduler,
            around=step_times.around,
        )
        with on_cpus({loop_cpu}):  # the host-driven loop's thread begins now
            engine.start()
        print(json.dumps({"gpu": device.name}), flush=True)
        engine.wait()
        np.save(times, step_times.read())


@dataclass
class Engine:
    """A running engine's process."""

    process: subprocess.Popen[str]
    client: LoadClient
    gpu: str

    def share_cores(self, cores: Cores) -> None:
        """Move the loop's thread to the neighbours' cores."""
        tasks = [int(task.name) for task in Path(f"/proc/{self.process.pid}/task").iterdir()]
        moved = [task for task in tasks if os.sched_getaffinity(task) == {cores.loop}]
        if len(moved) != 1:
            raise RuntimeError(f"threads {moved} run on CPU {cores.loop}, the loop's alone should")
        os.sched_setaffinity(moved[0], cores.others)


@contextmanager
def engine(scheduler: SchedulerPlace, tiny: bool, cores: Cores, times: Path) -> Iterator[Engine]:
    """An engine in a process of its own, READY; stopped on leaving, with ``times`` written."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        ring = Path(folder) / "ring"
        command = [sys.executable, "-m", "bench.ablation_engine", scheduler, str(ring), str(times), str(cores.loop)]
        command += ["--tiny"] if tiny else []
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        with on_cpus(cores.others):
            started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        with started as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the engine scheduled by the {scheduler} did not start: exit {process.wait()}")
            region = np.frombuffer(np.memmap(ring, np.uint8, "r+"), np.uint8)
            try:
                client = LoadClient(region, 1, prompt=PROMPT[1], max_tokens=GENERATED)
                yield Engine(process, client, json.loads(line)["gpu"])
            finally:
                _atomics.store_release(region, COMMAND, Command.STOP)
                if process.wait(30) != 0:
                    raise RuntimeError(f"the engine scheduled by the {scheduler} ended with {process.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scheduler", choices=("gpu", "host"))
    parser.add_argument("ring", type=Path)
    parser.add_argument("times", type=Path)
    parser.add_argument("loop_cpu", type=int)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    serve(arguments.ring, arguments.scheduler, model_of(arguments.tiny), arguments.loop_cpu, arguments.times)


if __name__ == "__main__":
    main()
