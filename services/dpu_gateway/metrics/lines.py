"""Metric families as lines of text, most of which are the same at every scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

END = b"# EOF\n"  # of an answer in OpenMetrics's format

Key = tuple[str, tuple[tuple[str, str], ...]]  # a sample's name and labels


@dataclass(frozen=True, slots=True)
class _Family:
    """One metric family as prometheus_client's encoders take it."""

    metric: Metric

    def collect(self) -> Iterable[Metric]:
        return (self.metric,)


class Lines:
    """One format. What stands before a value is made once, by the library's encoder, which checks and escapes it for
    3 µs (OpenMetrics: 7); all that a scrape does is to put values behind. For samples without timestamps and exemplars.
    """

    def __init__(self, encode: Callable[[_Family], bytes]) -> None:
        self._encode = encode
        self._heads: dict[str, bytes] = {}  # by the family's name
        self._beginnings: dict[Key, bytes] = {}
        self.end = END if encode(_Family(Metric("blink", "", "gauge"))).endswith(END) else b""

    def of(self, metric: Metric) -> bytes:
        """The family's lines, without ``end``."""
        head = self._heads.get(metric.name)
        if head is None:
            head = self._heads[metric.name] = self._lines(metric, [])
        parts = [head]
        for sample in metric.samples:
            key = (sample.name, tuple(sample.labels.items()))
            beginning = self._beginnings.get(key)
            if beginning is None:
                line = self._lines(metric, [sample]).removeprefix(head)
                beginning = self._beginnings[key] = line[: line.rindex(b" ") + 1]
            value = floatToGoString(sample.value)  # type: ignore[no-untyped-call]
            parts += (beginning, value.encode(), b"\n")
        return b"".join(parts)

    def _lines(self, metric: Metric, samples: list[Sample]) -> bytes:
        part = Metric(metric.name, metric.documentation, metric.type)
        part.samples = samples
        return self._encode(_Family(part)).removesuffix(END)
