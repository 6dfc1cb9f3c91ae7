"""All workers' figures, added up out of their files (prometheus_client's multi-process files).

The library's own collector does the same for every kind of figure there is, and reads each key's JSON anew at each
scrape; ours are counters, histograms and gauges of which the sum counts, so that a key's is read once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

MOST_KEYS = 1 << 14
BOUND = "le"
HISTOGRAM = "histogram"


class Series(NamedTuple):
    """Where one value of a file belongs; ``labels`` has all but a bucket's bound, which is None for other samples."""

    metric: str
    labels: tuple[tuple[str, str], ...]
    sample: str
    bound: str | None
    text: str


@lru_cache(MOST_KEYS)
def series_of(key: str) -> Series:
    """What a key of a file says."""
    metric, sample, labels, text = json.loads(key)
    bound = labels.pop(BOUND, None)
    if bound is not None:
        bound = floatToGoString(float(bound))  # type: ignore[no-untyped-call]
    return Series(metric, tuple(labels.items()), sample, bound, text)


def totals(files: Iterable[Path]) -> Iterator[Metric]:
    """The families of all files. One that is taken away meanwhile, with its worker, counts as gone."""
    kinds: dict[str, dict[str, float]] = {}
    for path in files:
        sums = kinds.setdefault(path.name.partition("_")[0], {})
        with contextlib.suppress(FileNotFoundError):
            for key, value, _, _ in MmapedDict.read_all_values_from_file(str(path)):  # type: ignore[no-untyped-call]
                sums[key] = sums.get(key, 0.0) + value
    for kind, sums in kinds.items():
        yield from _families(kind, [(series_of(key), value) for key, value in sums.items()])


def _families(kind: str, values: list[tuple[Series, float]]) -> Iterator[Metric]:
    """A histogram's buckets lie behind each other in a file, smallest bound first, and do not hold those before."""
    families: dict[str, Metric] = {}
    for (name, labels), group in groupby(values, key=lambda item: item[0][:2]):
        below = 0.0
        for series, value in group:
            family = families.get(name)
            if family is None:
                family = families[name] = Metric(name, series.text, kind)
            if series.bound is None:
                family.samples.append(Sample(series.sample, dict(labels), value))
            else:
                below += value
                family.samples.append(Sample(series.sample, {**dict(labels), BOUND: series.bound}, below))
        if kind == HISTOGRAM:
            families[name].samples.append(Sample(f"{name}_count", dict(labels), below))
    yield from families.values()
