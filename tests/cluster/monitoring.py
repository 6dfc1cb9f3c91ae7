"""Kinds of the Prometheus operator, generated from its own types by the program that it generates them with.

``python -m tests.cluster.monitoring`` does so.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from tests.cluster.binaries import MissingProgramError, go, go_build
from tests.cluster.fetch_helm import CACHE
from tests.cluster.processes import end_by_sigterm

MODULE = Path(__file__).parent / "monitoring_module"
GENERATOR = "sigs.k8s.io/controller-tools/cmd/controller-gen"
TYPES = "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring"
PLURALS = ("servicemonitors", "podmonitors")
SECONDS = 300


def kinds() -> list[Path]:
    """Definitions of the kinds that the chart makes objects of, kept in the cache. Raises MissingProgramError."""
    module = json.loads(go(MODULE, "mod", "download", "-json", TYPES))
    directory = CACHE / "monitoring" / module["Version"].removeprefix("v")
    paths = [directory / f"monitoring.coreos.com_{plural}.yaml" for plural in PLURALS]
    if not all(path.exists() for path in paths):
        go_build(MODULE, [GENERATOR], directory)
        with tempfile.TemporaryDirectory(dir=directory) as fresh:
            command = [directory / "controller-gen", "crd", f"paths={TYPES}/v1", f"output:crd:dir={fresh}"]
            done = subprocess.run(command, cwd=MODULE, capture_output=True, text=True, timeout=SECONDS, check=False)
            if done.returncode != 0:
                raise MissingProgramError(f"controller-gen: {done.stderr.strip()[-2000:]}")
            for path in paths:
                (Path(fresh) / path.name).replace(path)
    return paths


if __name__ == "__main__":
    end_by_sigterm()
    print(*kinds(), sep="\n")
