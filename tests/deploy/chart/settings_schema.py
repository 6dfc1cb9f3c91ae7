"""``python -m tests.deploy.chart.settings_schema`` has the chart's schema say of settings what their processes take."""

from __future__ import annotations

import json
import re

from pydantic_settings import BaseSettings

from services.bootstrap.settings import BootstrapSettings
from services.colocation.settings import OperatorSettings
from services.dpu_gateway.settings import GatewaySettings
from tests.deploy.chart.rendering import CHART, Json

PATH = CHART / "values.schema.json"
HANDSHAKE = {"handshake_certificate", "handshake_key", "handshake_authority"}
# By the chart's section: the settings, without those that the chart itself decides.
SECTIONS: dict[str, tuple[type[BaseSettings], set[str]]] = {
    "engine": (BootstrapSettings, {"model", "engine", "transport", "listen", "instance", *HANDSHAKE}),
    "gateway": (
        GatewaySettings,
        {
            "worker",
            "listen",
            "http_listen",
            "health_listen",
            "transport",
            "bootstrap",
            "gateway_id",
            "drain_limit",
            "instance",
            *HANDSHAKE,
        },
    ),
    "operator": (
        OperatorSettings,
        {"identity", "namespace", "lease", "priority_class", "metrics_port", "health_port"},
    ),
}
KEPT = ("type", "enum", "minimum", "maximum", "exclusiveMinimum", "multipleOf", "minLength", "maxLength", "pattern")


def schema_of(section: str) -> Json:
    """Each setting's name with what it takes."""
    settings, decided = SECTIONS[section]
    found = settings.model_json_schema()["properties"]
    properties = {name: _plain(each) for name, each in sorted(found.items()) if name not in decided}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _plain(of: Json) -> Json:
    """Without what is for people. What may be left out is not given, so that null is no choice."""
    (first, *_) = of.get("anyOf", (of,))
    return {name: first[name] for name in KEPT if name in first}


def write() -> None:
    """In place, as the file's own lines are."""
    text = PATH.read_text()
    for section in SECTIONS:
        lines = [f"            {json.dumps(n)}: {json.dumps(p)}" for n, p in schema_of(section)["properties"].items()]
        made = (
            '"settings": {\n          "type": "object",\n          "additionalProperties": false,\n'
            '          "properties": {\n' + ",\n".join(lines) + "\n          }\n        },\n"
        )
        start = text.index(f'\n    "{section}": {{\n')
        at = text.index('"settings": {', start)
        end = re.compile(r"^        \},\n", re.MULTILINE).search(text, at)
        assert end is not None
        text = text[:at] + made + text[end.end() :]
    PATH.write_text(text)


if __name__ == "__main__":
    write()
