"""What a scrape says, parsed as Prometheus would."""

from __future__ import annotations

import httpx2
from prometheus_client.parser import text_string_to_metric_families

Labels = dict[str, str]


class Scraped:
    """Samples by name and labels; one that is absent is 0, as to a query that adds."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self._samples = [sample for family in self.families.values() for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """The sum over samples that carry these labels."""
        return sum(
            float(sample.value)
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    @property
    def names(self) -> set[str]:
        return {sample.name for sample in self._samples}


async def scrape(client: httpx2.AsyncClient) -> Scraped:
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    return Scraped(response.text)
