"""One reading of the metrics endpoint, which any worker answers for all."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import requests
from prometheus_client.parser import text_string_to_metric_families

from services.cli.channel import CERTIFICATE_VARIABLE, KEY_VARIABLE, check_authority
from services.cli.errors import CommandError
from services.cli.program import AUTHORITY_VARIABLE, tls_hint

SECONDS = 5.0


@dataclass(frozen=True)
class Scrape:
    """Samples by name, and by one label of theirs where they have it; models are added up."""

    taken_at: float  # monotonic seconds
    values: Mapping[str, Mapping[str, float]]

    @classmethod
    def parse(cls, text: str, taken_at: float) -> Scrape:
        """Raises ValueError for what is no metrics."""
        values: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                label = next((value for name, value in sample.labels.items() if name != "model_name"), "")
                values[sample.name][label] = values[sample.name].get(label, 0.0) + sample.value
        return cls(taken_at, dict(values))

    def value(self, name: str) -> float:
        """The sum over labels; 0 when there is none."""
        return sum(self.values.get(name, {}).values())

    def by_label(self, name: str) -> dict[str, float]:
        return dict(self.values.get(name, {}))


def read(url: str) -> Scrape:
    """Ask once. Raises CommandError."""
    check_authority()
    certificate, key = os.environ.get(CERTIFICATE_VARIABLE), os.environ.get(KEY_VARIABLE)
    try:
        response = requests.get(
            f"{url}/metrics",
            timeout=SECONDS,
            verify=os.environ.get(AUTHORITY_VARIABLE) or True,
            cert=(certificate, key) if certificate and key else None,
        )
        response.raise_for_status()
        return Scrape.parse(response.text, time.monotonic())
    except requests.ConnectionError as error:
        raise CommandError(
            f"no gateway answers at {url}: start one, or name another with --http{tls_hint()}"
        ) from error
    except (requests.RequestException, OSError, ValueError) as error:
        raise CommandError(f"{url}/metrics: {error}") from error


def increase(before: Scrape, now: Scrape, name: str) -> dict[str, float]:
    """What counters grew by, by label; what began anew since then has grown from 0."""
    old = before.by_label(name)
    return {
        label: value - old.get(label, 0.0) if value >= old.get(label, 0.0) else value
        for label, value in now.by_label(name).items()
    }
