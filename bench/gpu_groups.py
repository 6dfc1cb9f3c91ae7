"""The groups of GPU tests: which may run beside each other, and which need the GPU for themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests" / "gpu"
PYTEST = ("-m", "pytest", "-o", "addopts=", "-W", "ignore::pytest.PytestConfigWarning", "--import-mode=importlib")
"""With whatever pytest the GPU machine has: the project's options need plugins."""

ALONE = {  # seconds
    "test_control_loop": 100.0,
    "test_control_loop_failures": 60.0,
    "test_device_ring": 40.0,
    "test_memory": 60.0,
    "test_prefix_cache": 60.0,
    "test_smollm2": 60.0,
    "test_same_tokens": 60.0,
}
"""They keep a loop on the GPU, measure times or fill its memory; each may take so long."""

SHARES = {
    "test_step": 6,
    "test_skinny_gemm": 4,
    "test_wide_swiglu": 3,
    "test_elementwise": 2,
    "test_attention": 4,
    "test_skinny_step": 3,
    "test_fused_decode": 8,
}
"""Processes among which a file's tests are dealt out: they are the longest, and mostly NumPy or torch on the host."""
BESIDE_SECONDS = 110.0


@dataclass(frozen=True)
class Group:
    """What one process runs.

    Attributes:
        share: this group takes tests ``share``, ``share + shares`` ... of the file, module-scoped parameters together.
    """

    file: Path
    seconds: float
    share: int = 0
    shares: int = 1

    @property
    def name(self) -> str:
        return self.file.stem + (f" {self.share + 1}/{self.shares}" if self.shares > 1 else "")


def beside_each_other() -> list[Path]:
    """The files whose tests don't mind others, sorted."""
    return [file for file in sorted(TESTS.glob("test_*.py")) if file.stem not in ALONE]


def parallel_groups() -> list[Group]:
    """The longest first."""
    files = sorted(beside_each_other(), key=lambda file: -SHARES.get(file.stem, 1))
    counts = [(file, SHARES.get(file.stem, 1)) for file in files]
    return [Group(file, BESIDE_SECONDS, share, shares) for file, shares in counts for share in range(shares)]


def lone_groups() -> list[Group]:
    return [Group(TESTS / f"{stem}.py", seconds) for stem, seconds in ALONE.items()]
