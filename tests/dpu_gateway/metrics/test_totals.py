"""The sum of all workers' files says what prometheus_client's own collector says of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from services.dpu_gateway.metrics.totals import totals

# A process of its own: where figures lie is chosen once in a process's life.
WORKER = """
import sys
from pathlib import Path
from services.dpu_gateway.metrics.sharing import SharedFigures
SharedFigures(Path(sys.argv[1]), int(sys.argv[2])).open()
from services.dpu_gateway.errors import FieldError
from services.dpu_gateway.metrics.gateway import End, GatewayMetrics
metrics = GatewayMetrics()
for model in sys.argv[3:]:
    figures = metrics.of_model(model)
    for seconds in (0.0, 0.004, 0.3, 1e9):
        figures.first_token.observe(seconds)
        figures.between_tokens.observe_many(seconds, 3)
    figures.ends[End.LENGTH].inc()
metrics.open_requests.inc(2)
if len(sys.argv) > 4:
    metrics.refused(FieldError("text", "is empty"))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of two workers, one of which served another model, too, and refused a request."""
    directory = tmp_path_factory.mktemp("figures")
    for worker in (["0", "small"], ["1", "large", 'quoted"\\name']):
        subprocess.run([sys.executable, "-c", WORKER, str(directory), *worker], check=True)
    return sorted(directory.glob("*.db"))


def samples(metrics: list[Metric]) -> dict[tuple[str, str, frozenset[tuple[str, str]]], float]:
    found = {
        (metric.type, sample.name, frozenset(sample.labels.items())): sample.value
        for metric in metrics
        for sample in metric.samples
    }
    assert len(found) == sum(len(metric.samples) for metric in metrics)
    return found


def test_every_sample_is_as_the_library_sums_it(files: list[Path]) -> None:
    library = MultiProcessCollector(CollectorRegistry(), path=str(files[0].parent))  # type: ignore[no-untyped-call]
    theirs = list(library.collect())  # type: ignore[no-untyped-call]
    ours = list(totals(files))
    assert samples(ours) == samples(theirs)
    assert len(samples(ours)) > 500
    assert {each.name: each.documentation for each in ours} == {each.name: each.documentation for each in theirs}


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_both_formats_take_what_is_summed(files: list[Path], accept: str) -> None:
    """OpenMetrics's wants the buckets of a series in order and its samples together."""
    encode, _ = choose_encoder(accept)

    class Families:
        def collect(self) -> list[Metric]:
            return list(totals(files))

    assert b'blink_time_to_first_token_seconds_bucket{le="+Inf",model_name="small"} 4' in encode(Families())


def test_files_that_are_taken_away_meanwhile_count_as_gone(files: list[Path], tmp_path: Path) -> None:
    kept = [Path(shutil.copy(path, tmp_path)) for path in files if path.stem.endswith("_0")]
    gone = [tmp_path / path.name for path in files if path.stem.endswith("_1")]
    assert samples(list(totals([*kept, *gone]))) == samples(list(totals(kept)))
