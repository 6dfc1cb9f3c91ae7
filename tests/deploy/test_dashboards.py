"""Dashboard and alerts ask for metrics that exist, with labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dpu_gateway.harness import collect, gateway, max_tokens, text_request
from tests.dpu_gateway.http.clients import http_client
from tests.dpu_gateway.metrics.scraped import Scraped, scrape

DEPLOY = Path(__file__).parents[2] / "deploy"
METRIC = re.compile(r"\bblink_[a-z0-9_]+")
SELECTOR = re.compile(r"(blink_[a-z0-9_]+)\{([^}]*)\}")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
GROUPING = re.compile(r"\bby \(([^)]*)\)")
OF_THE_SCRAPER = {"instance", "job"}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "blink.json").read_text())
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    board = dashboard()
    panels = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    variables = [each["query"]["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    return panels + variables + [rule["expr"] for rule in rules()]


async def exposed() -> Scraped:
    """With every labelled metric in use."""
    async with gateway() as system, http_client(system) as client:
        await collect(system.inference().Generate(text_request(stop=max_tokens(2))))
        await collect(system.inference().Generate(text_request("")))
        return await scrape(client)


async def test_every_metric_that_is_asked_for_exists_with_its_labels() -> None:
    seen = await exposed()
    labels: dict[str, set[str]] = {}
    for family in seen.families.values():
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    asked = expressions()
    assert len(asked) > 30
    for expression in asked:
        names = set(METRIC.findall(expression))
        assert names <= set(labels), (names - set(labels), expression)
        for name, selector in SELECTOR.findall(expression):
            assert set(LABEL.findall(selector)) <= labels[name] | OF_THE_SCRAPER, expression
        known = set().union(*(labels[name] for name in names)) | OF_THE_SCRAPER
        for grouping in GROUPING.findall(expression):
            assert {label.strip() for label in grouping.split(",")} <= known, expression


async def test_every_metric_that_exists_is_on_the_dashboard_or_named_here() -> None:
    """A new metric is shown to operators, or left out on purpose."""
    left_out = {"blink_kv_cache_pages", "blink_lane_attached", "blink_lane_slots"}
    left_out |= {"blink_lane_rejected", "blink_lane_generation_tokens", "blink_engine_requests_finished"}
    shown = " ".join(expressions())
    assert {name for name in (await exposed()).families if not re.search(rf"\b{name}(_|\b)", shown)} == left_out


def test_panels_are_told_apart_and_lie_beside_each_other() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_says_what_is_wrong_and_what_to_do(rule: dict[str, Any]) -> None:
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert set(rule["annotations"]) == {"summary", "description"}
