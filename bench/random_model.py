"""A model of random weights on the GPU, and executors of its steps."""

from __future__ import annotations

from bench.families import MODELS, RandomWeights
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Device
from services.gpu_engine.cuda.executor import StepExecutor
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.cuda.step_arrays import StepArrays
from services.gpu_engine.cuda.weights import DeviceWeights


class RandomModel:
    """``name``: of MODELS."""

    def __init__(self, name: str) -> None:
        self.device = Device()
        self.config = MODELS[name]
        self.geometry = Geometry(self.config)
        source = RandomWeights(self.config)
        self.layers, self.weights = source.layers, DeviceWeights(source)

    def executor(self, arrays: StepArrays, pages: int, compiler: Compiler) -> StepExecutor:
        """Of the steps in ``arrays``, with a cache of so many ``pages``, all zero; the caller says what computes its
        products."""
        executor = StepExecutor(
            self.device,
            self.geometry,
            self.layers,
            self.weights,
            step=arrays.addresses,
            limits=arrays.limits,
            pages=pages,
            compiler=compiler,
            skinny=False,
        )
        executor.cache.fill(0)
        return executor
