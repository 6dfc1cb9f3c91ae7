"""What is asked, and when: from distributions, or from a trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.cli.bench.arrivals import arrival_times
from services.cli.bench.kinds import Arrivals
from services.cli.bench.lengths import Lengths
from services.cli.errors import CommandError


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a load."""

    at: float  # seconds from the start
    prompt_tokens: int
    output_tokens: int
    seed: int  # of its prompt
    prompt: str | None = None  # as a trace has it; else one is made


@dataclass(frozen=True)
class Synthetic:
    """Requests drawn from distributions."""

    arrivals: Arrivals
    burst_shape: float
    prompts: Lengths
    outputs: Lengths
    seconds: float

    def requests(self, rate: float, seed: int) -> list[Request]:
        """The same for the same arguments. ``rate`` is requests a second."""
        rng = np.random.default_rng(seed)
        times = arrival_times(self.arrivals, rate, self.seconds, rng, self.burst_shape)
        prompts, outputs = self.prompts.draw(times.size, rng), self.outputs.draw(times.size, rng)
        seeds = rng.integers(0, 1 << 62, times.size)
        columns = (times.tolist(), prompts.tolist(), outputs.tolist(), seeds.tolist())
        return [Request(*row) for row in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Trace:
    """Requests of a file, each at its own time."""

    entries: tuple[Request, ...]

    @classmethod
    def read(cls, path: Path) -> Trace:
        """A line of JSON for each request, as in Mooncake's traces: ``timestamp`` in ms, ``input_length`` and
        ``output_length`` in tokens, others are ignored; ``prompt``, a text, may stand for ``input_length``.

        Raises CommandError that names the line.
        """
        try:
            entries = sorted(_entries(path), key=lambda entry: entry.at)
        except OSError as error:
            raise CommandError(f"trace {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise CommandError(f"trace {path}: {error}") from error
        if not entries:
            raise CommandError(f"trace {path} has no requests")
        return cls(tuple(entries))

    def requests(self, speed: float, seed: int) -> list[Request]:
        """``speed`` times as fast as it was recorded; prompts that are made differ from seed to seed."""
        return [
            Request(entry.at / speed, entry.prompt_tokens, entry.output_tokens, entry.seed + (seed << 32), entry.prompt)
            for entry in self.entries
        ]


def _entries(path: Path) -> Iterator[Request]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                prompt = entry.get("prompt")
                known = 1 if prompt is not None else entry["input_length"]
                request = Request(
                    float(entry["timestamp"]) / 1000, int(known), int(entry["output_length"]), number, prompt
                )
                if request.at < 0 or request.prompt_tokens < 1 or request.output_tokens < 1:
                    raise ValueError("timestamp must not be negative, lengths must be positive")
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise CommandError(f"trace {path}, line {number}: {error!r}") from error
            yield request


Workload = Synthetic | Trace
