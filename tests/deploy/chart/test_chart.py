"""The chart, rendered by the real helm: valid for three versions of Kubernetes, and safe in every profile."""

from __future__ import annotations

import re
from collections import Counter

import kubernetes_validate
import pytest

from services.bootstrap.probe import ANSWER_SECONDS, WATCH_SECONDS
from services.bootstrap.settings import BootstrapSettings
from services.colocation.settings import OperatorSettings
from services.dpu_gateway.settings import GatewaySettings
from tests.deploy.chart.rendering import CHART, PROFILES, Json, containers, pods, profile, rendered, run

VERSIONS = ("1.31.0", "1.34.0", "1.37.0")
EVERYTHING = {
    "serviceMonitor": {"enabled": True},
    "tenants": {"namespace": "batch", "createNamespace": True, "users": [{"kind": "User", "name": "ada"}]},
}
FOREIGN = {"ServiceMonitor", "PodMonitor"}  # kinds of the Prometheus operator
SETTINGS = {"BOOTSTRAP": BootstrapSettings, "GATEWAY": GatewaySettings, "OPERATOR": OperatorSettings}

each_profile = pytest.mark.parametrize("name", PROFILES)


@each_profile
def test_helm_finds_nothing_to_complain_about(name: str) -> None:
    done = run("lint", "--strict", str(CHART), *profile(name))
    assert done.returncode == 0, done.stdout


@each_profile
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_for_this_version_of_kubernetes(name: str, version: str) -> None:
    for each in rendered(name, EVERYTHING):
        if each["kind"] not in FOREIGN:
            kubernetes_validate.validate(each, version, strict=True)


@each_profile
def test_no_container_runs_as_root_writes_to_its_image_or_may_gain_rights(name: str) -> None:
    objects = rendered(name, EVERYTHING)
    assert len(containers(objects)) >= 4
    for pod_name, pod in pods(objects):
        assert pod["securityContext"]["runAsNonRoot"], pod_name
        assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault", pod_name
        assert not {"hostPID", "hostIPC"} & set(pod), pod_name
    for container_name, each in containers(objects):
        security = each["securityContext"]
        assert security["readOnlyRootFilesystem"], container_name
        assert security["runAsNonRoot"], container_name
        assert not security["allowPrivilegeEscalation"], container_name
        assert security["capabilities"]["drop"] == ["ALL"], container_name
        assert set(security["capabilities"].get("add", ())) <= {"IPC_LOCK"}, container_name
        assert {"requests", "limits"} <= set(each["resources"]), container_name
        assert "memory" in each["resources"]["limits"], container_name


@each_profile
def test_only_what_calls_the_api_server_gets_a_token(name: str) -> None:
    with_token = {pod_name for pod_name, pod in pods(rendered(name)) if pod["automountServiceAccountToken"]}
    assert with_token == {"blink-operator", "blink-uninstall"}


@each_profile
def test_what_serves_drains_within_its_grace_period_and_has_all_probes(name: str) -> None:
    serving = [(n, p) for n, p in pods(rendered(name)) if any("gateway" in c["name"] for c in p["containers"])]
    assert serving
    for _, pod in serving:
        if name != "dpu-rdma":  # the engine outlives the gateways beside it
            assert [each["name"] for each in pod["initContainers"] if each.get("restartPolicy") == "Always"] == [
                "engine"
            ]
        for each in pod["containers"]:
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(each)
            if each["name"].startswith("gateway"):
                environment = {e["name"]: e.get("value") for e in each["env"]}
                stop = each["lifecycle"]["preStop"]["sleep"]["seconds"]
                drain = int(environment["BLINK_GATEWAY_DRAIN_LIMIT"] or 0)
                assert stop + drain < pod["terminationGracePeriodSeconds"]


@each_profile
def test_each_worker_is_asked_for_its_own_health_at_a_port_that_no_other_has(name: str) -> None:
    workers = 3
    found = [each for n, each in containers(rendered(name, {"gateway": {"workers": workers}})) if "/gateway-" in n]
    assert len(found) == workers
    asked = set()
    for each in found:
        ports = {port["name"]: port["containerPort"] for port in each["ports"]}
        environment = {e["name"]: e.get("value") for e in each["env"]}
        for probe, path in (("startupProbe", "/health"), ("livenessProbe", "/health"), ("readinessProbe", "/ready")):
            assert each[probe]["httpGet"]["path"] == path
            port = ports[each[probe]["httpGet"]["port"]]
            assert environment["BLINK_GATEWAY_HEALTH_LISTEN"] == f"0.0.0.0:{port}"
            asked.add(port)
    assert len(asked) == workers
    shared = {int(str(e["value"]).rpartition(":")[2]) for c in found for e in c["env"] if e["name"].endswith("_LISTEN")}
    assert len(shared) == workers + 2  # gRPC and HTTP, which all of them have


@each_profile
def test_a_control_loop_that_stands_still_is_restarted(name: str) -> None:
    for own, stall in (({}, 120), ({"progress_timeout": 30}, 120), ({"progress_timeout": 300.5}, 301)):
        objects = rendered(name, {"gateway": {"settings": own}})
        (engine,) = (each for container_name, each in containers(objects) if container_name.endswith("/engine"))
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert engine[probe]["exec"]["command"] == ["python", "-m", "services.bootstrap.probe", str(stall)]
            longest = WATCH_SECONDS + 2 * ANSWER_SECONDS  # else it is killed before it can say what is wrong
            assert engine[probe].get("timeoutSeconds", 1) > longest


@each_profile
def test_an_engine_drains_no_longer_than_its_pod_is_let(name: str) -> None:
    for seconds in (0, 30, 100):
        objects = rendered(name, {"gateway": {"drainSeconds": seconds}})
        for pod_name, pod in pods(objects):
            for each in (*pod.get("initContainers", ()), *pod["containers"]):
                told = {e["name"]: e.get("value", "") for e in each.get("env", ())}
                if "BLINK_BOOTSTRAP_ENGINE" in told:
                    assert float(told["BLINK_BOOTSTRAP_DRAIN_SECONDS"]) < pod["terminationGracePeriodSeconds"], pod_name


@pytest.mark.parametrize(
    ("gateway", "lanes", "one_more"),
    [
        ({"workers": 1, "replicas": 3}, 4, True),
        ({"workers": 1, "replicas": 4}, 4, False),  # the engine's lanes are all taken
        ({"workers": 4, "replicas": 1}, 16, True),
        ({"workers": 1, "hostNetwork": True}, 16, False),  # the node's ports are
        ({"workers": 1, "rdmaResource": "example.com/nic"}, 16, False),
    ],
)
def test_gateways_are_replaced_one_by_one_where_there_is_no_room_for_one_more(
    gateway: Json, lanes: int, one_more: bool
) -> None:
    own: Json = {"kind": "Deployment", "rdmaResource": "", **gateway}
    objects = rendered("dpu-rdma", {"gateway": own, "engine": {"settings": {"lanes": lanes}}})
    (found,) = (each for each in objects if each["metadata"]["name"] == "blink-gateway" and "replicas" in each["spec"])
    surge, away = (1, 0) if one_more else (0, 1)
    assert found["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": surge, "maxUnavailable": away}


@each_profile
def test_every_variable_is_a_setting_that_its_process_takes(name: str) -> None:
    own: Json = {"engine": {"settings": {"kv_tokens": 4096}}, "gateway": {"settings": {"poll_fast_us": 250}}}
    seen: dict[str, set[str]] = {process: set() for process in SETTINGS}
    for container_name, each in containers(rendered(name, own)):
        values: dict[str, dict[str, str]] = {process: {} for process in SETTINGS}
        for variable in each.get("env", ()):
            if match := re.fullmatch(r"BLINK_(BOOTSTRAP|GATEWAY|OPERATOR)_(.+)", variable["name"]):
                values[match[1]][match[2].lower()] = str(variable.get("value", "x"))
        for process, found in values.items():
            seen[process] |= set(found)
            if found:
                SETTINGS[process](**found), container_name  # refuses what it does not know
    assert "kv_tokens" in seen["BOOTSTRAP"]
    assert "poll_fast_us" in seen["GATEWAY"]
    assert "identity" in seen["OPERATOR"]


@each_profile
def test_network_policies_budgets_and_services_select_pods_that_exist(name: str) -> None:
    objects = rendered(name)
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in objects if "template" in each.get("spec", {})]
    selecting = 0
    for each in objects:
        spec = each.get("spec", {})
        selector = {
            "NetworkPolicy": lambda s: s["podSelector"]["matchLabels"],
            "PodDisruptionBudget": lambda s: s["selector"]["matchLabels"],
            "Service": lambda s: s["selector"],
        }.get(each["kind"])
        if selector is not None:
            selecting += 1
            assert any(selector(spec).items() <= own.items() for own in labels), each["metadata"]["name"]
    assert selecting >= 5


def test_large_and_fractional_settings_reach_their_process_as_they_were_given() -> None:
    own: Json = {
        "engine": {"settings": {"kv_tokens": 67_108_864, "drain_seconds": 2.5, "prefix_cache": "off"}},
        "gateway": {"settings": {"max_message_bytes": 1_073_741_824, "watch_interval": 0.05}},
        "operator": {"settings": {"interval": 1}},
    }
    given = {
        v["name"]: v.get("value") for _, each in containers(rendered("cpu-demo", own)) for v in each.get("env", ())
    }
    assert given["BLINK_BOOTSTRAP_KV_TOKENS"] == "67108864"
    assert given["BLINK_BOOTSTRAP_DRAIN_SECONDS"] == "2.5"
    assert given["BLINK_BOOTSTRAP_PREFIX_CACHE"] == "off"
    assert given["BLINK_GATEWAY_MAX_MESSAGE_BYTES"] == "1073741824"
    assert given["BLINK_GATEWAY_WATCH_INTERVAL"] == "0.05"
    assert given["BLINK_OPERATOR_INTERVAL"] == "1"


@each_profile
def test_prometheus_is_sent_to_ports_that_exist(name: str) -> None:
    objects = rendered(name, EVERYTHING)
    (of_service,) = (each for each in objects if each["kind"] == "ServiceMonitor")
    selected = [
        each
        for each in objects
        if each["kind"] == "Service"
        and of_service["spec"]["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
    ]
    assert [each["metadata"]["name"] for each in selected] == ["blink-metrics"]
    assert {e["port"] for e in of_service["spec"]["endpoints"]} <= {p["name"] for p in selected[0]["spec"]["ports"]}
    (of_pods,) = (each for each in objects if each["kind"] == "PodMonitor")
    wanted = of_pods["spec"]["selector"]["matchLabels"].items()
    found = [
        each["spec"]["template"]["spec"]
        for each in objects
        if each["kind"] == "Deployment" and wanted <= each["spec"]["template"]["metadata"]["labels"].items()
    ]
    ports = {port["name"] for pod in found for each in pod["containers"] for port in each.get("ports", ())}
    assert {e["port"] for e in of_pods["spec"]["podMetricsEndpoints"]} <= ports


def test_serving_goes_before_tenants() -> None:
    values = {o["metadata"]["name"]: o["value"] for o in rendered("cpu-demo") if o["kind"] == "PriorityClass"}
    assert values["blink-serving"] > 0 > values["blink-tenants"]


def test_every_process_that_opens_an_rdma_device_asks_for_it_by_the_name_that_the_values_give() -> None:
    workers = 2
    own: Json = {
        "engine": {"rdmaResource": "example.com/hca"},
        "gateway": {"rdmaResource": "example.com/sf", "workers": workers},
    }
    wanted = {name: each["resources"]["limits"] for name, each in containers(rendered("dpu-rdma", own))}
    assert wanted["blink-engine/engine"]["example.com/hca"] == 1
    of_gateways = {name: limits["example.com/sf"] for name, limits in wanted.items() if "example.com/sf" in limits}
    assert of_gateways == {f"blink-gateway/gateway-{worker}": 1 for worker in range(workers)}


@each_profile
def test_pods_of_the_tenants_namespace_get_none_of_the_devices_that_serving_asks_for(name: str) -> None:
    objects = rendered(name, EVERYTHING)
    asked = {
        device
        for _, each in containers(objects)
        for amounts in each["resources"].values()
        for device in amounts
        if "/" in device
    }
    assert bool(asked) == (name != "cpu-demo")
    (quota,) = (each["spec"]["hard"] for each in objects if each["kind"] == "ResourceQuota")
    assert {limit: amount for limit, amount in quota.items() if "/" in limit and not limit.startswith("count/")} == {
        f"requests.{device}": "0" for device in asked
    }


@each_profile
def test_the_notes_wait_for_all_that_serves(name: str) -> None:
    done = run("install", "blink", str(CHART), "--dry-run=client", "--namespace", "serving", *profile(name))
    assert done.returncode == 0, done.stderr
    notes = done.stdout.rpartition("NOTES:")[2]
    kinds = Counter(each["kind"] for each in rendered(name))
    assert kinds["Deployment"]
    assert "condition=Available --timeout=10m deployment -l app.kubernetes.io/instance=blink\n" in notes
    for each in rendered(name):
        if each["kind"] == "DaemonSet":
            assert f"rollout status --timeout=10m daemonset/{each['metadata']['name']}\n" in notes
