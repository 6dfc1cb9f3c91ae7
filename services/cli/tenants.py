"""``blink tenants``: who runs where, the cores that serving leaves, the SLO's margin, and why one waits."""

from __future__ import annotations

import json
import os
from http import HTTPStatus
from typing import Any, cast

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.cli.errors import CommandError

CALL_SECONDS = 10.0
HEALTHY = "Normal"

Json = dict[str, Any]


def tenants(namespace: str | None, context: str | None, as_json: bool) -> None:
    """Run the command. Raises CommandError when the cluster can't be asked or has no operator's objects."""
    pools, things = fetch(namespace, context)
    if as_json:
        print(json.dumps({"pools": pools, "tenants": things}, indent=2))
    else:
        Console().print(render(pools, things))


def fetch(namespace: str | None, context: str | None) -> tuple[list[Json], list[Json]]:
    """TenantPools and Tenants as the API server gives them. Raises CommandError."""
    try:
        from kubernetes import client, config  # noqa: PLC0415 (only this command needs it)
        from urllib3.exceptions import HTTPError  # noqa: PLC0415
    except ImportError as error:
        raise CommandError(
            "`blink tenants` needs the kubernetes client: pip install '.[operator]' in Blink's checkout"
        ) from error

    from services.colocation.names import GROUP, POOLS, TENANTS, VERSION  # noqa: PLC0415

    try:
        try:
            config.load_incluster_config()  # type: ignore[no-untyped-call]
        except config.ConfigException:
            config.load_kube_config(context=context)  # type: ignore[no-untyped-call]
        api = client.CustomObjectsApi()
        pools = api.list_cluster_custom_object(GROUP, VERSION, POOLS, _request_timeout=CALL_SECONDS)
        found = (
            api.list_namespaced_custom_object(GROUP, VERSION, namespace, TENANTS, _request_timeout=CALL_SECONDS)
            if namespace
            else api.list_cluster_custom_object(GROUP, VERSION, TENANTS, _request_timeout=CALL_SECONDS)
        )
    except config.ConfigException as error:
        raise CommandError(_no_cluster(context, error)) from error
    except client.ApiException as error:
        raise CommandError(_refusal(error.status, error.body or error.reason or "", namespace)) from error
    except (HTTPError, OSError) as error:
        where = client.Configuration.get_default_copy().host
        raise CommandError(
            f"no cluster answers at {where}: {str(error).splitlines()[0]}; is that the one you mean? KUBECONFIG and "
            "--context choose another"
        ) from error
    return cast(Json, pools)["items"], cast(Json, found)["items"]


def _refusal(status: int | None, body: str, namespace: str | None) -> str:
    """What the API server says, and what to do."""
    try:
        said = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):  # not every refusal is the API server's own
        said = " ".join(body.split())
    hint = ""
    if status == HTTPStatus.NOT_FOUND:
        hint = "; is Blink's chart installed?"
    elif status == HTTPStatus.FORBIDDEN and not namespace:
        hint = "; the chart lets its tenants.users see the Tenants of one namespace: name it, --namespace NAME"
    return f"the cluster refuses: {status} {said}{hint}"


def _no_cluster(context: str | None, error: Exception) -> str:
    """What was tried, and what to do."""
    files = os.environ.get("KUBECONFIG") or "~/.kube/config"
    tried = f"this is no pod, and {files} {'lacks context ' + repr(context) if context else 'names no cluster'}"
    return f"no cluster to ask: {tried} ({error}); set KUBECONFIG to the file of one that runs Blink's chart"


def render(pools: list[Json], things: list[Json]) -> RenderableType:
    """Two tables."""
    if not pools and not things:
        return Text("no TenantPools and no Tenants")
    return Group(_pools(pools), Text(""), _tenants(things))


def _pools(pools: list[Json]) -> Table:
    table = _table("pool", "nodes", "freed", "used", "waiting", "stage", "SLO")
    for pool in sorted(pools, key=lambda each: str(each["metadata"]["name"])):
        status = pool.get("status") or {}
        stage = (status.get("guard") or {}).get("stage", "-")
        table.add_row(
            pool["metadata"]["name"],
            *(str(status.get(name, "-")) for name in ("nodes", "freedCores", "usedCores", "waiting")),
            Text(stage, "" if stage in {HEALTHY, "-"} else "bold red"),
            _problem(status) or status.get("slo", "-"),
        )
    return table


def _problem(status: Json) -> str:
    """The first condition that an operator should know of."""
    wanted = {"Ready": "True", "Conflicted": "False", "MetricsAvailable": "True"}
    for each in status.get("conditions") or ():
        if wanted.get(each["type"], each["status"]) != each["status"]:
            return f"{each['reason']}: {each['message']}"
    return ""


def _tenants(things: list[Json]) -> Table:
    table = _table("tenant", "pool", "phase", "node", "cores", "priority", "why")
    for thing in sorted(things, key=_order):
        spec, status = thing["spec"], thing.get("status") or {}
        cores = spec["cores"]
        wanted = f"{cores['min']}-{cores.get('max', cores['min'])}"
        position = f", {status['position']}. in line" if status.get("position") else ""
        table.add_row(
            f"{thing['metadata']['namespace']}/{thing['metadata']['name']}",
            spec["pool"],
            status.get("phase", "new"),
            status.get("node", "-"),
            f"{status.get('cores', 0)} of {wanted}",
            str(spec.get("priority", 0)),
            f"{status.get('message', '')}{position}",
        )
    return table


def _order(thing: Json) -> tuple[str, int, str, str]:
    status = thing.get("status") or {}
    place = {"Running": -1, "Succeeded": 1 << 30, "Failed": 1 << 30}.get(status.get("phase", ""), 1 << 20)
    metadata = thing["metadata"]
    return thing["spec"]["pool"], status.get("position", place), metadata["namespace"], metadata["name"]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column not in {"why", "SLO"}, overflow="fold")
    return table
