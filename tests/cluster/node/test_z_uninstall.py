"""Last: nothing is left of a release."""

from __future__ import annotations

from tests.cluster.control_plane import Client
from tests.cluster.node.release import NAMESPACE, Release
from tests.cluster.scene import POOLS, eventually, pool_manifest, tenant_manifest

SELECTOR = "app.kubernetes.io/part-of=blink"


def test_uninstalling_leaves_nothing_but_the_namespace(release: Release, client: Client) -> None:
    client.call("POST", "/api/v1/namespaces", {"metadata": {"name": "batch"}})
    client.create(POOLS, pool_manifest("p"))
    client.create("/apis/blink.dev/v1alpha1/namespaces/batch/tenants", tenant_manifest("waits"))
    release.helm("uninstall", "blink", "--wait", "--timeout", "240s")
    kinds = release.kubectl("api-resources", "--verbs=list", "--output=name").split()
    assert not [kind for kind in kinds if kind.endswith("blink.dev")]
    listable = ",".join(kind for kind in kinds if not kind.startswith("events"))

    def left() -> str:
        mine = release.kubectl("get", listable, "--all-namespaces", f"--selector={SELECTOR}", "--output=name")
        return mine + release.kubectl("get", "jobs,pods", "--namespace", "batch", "--output=name")

    eventually(lambda: not left(), left)
    assert not release.kubectl("get", "secrets,configmaps", "-n", NAMESPACE, "-o", "name").replace(
        "configmap/kube-root-ca.crt\n", ""
    )
