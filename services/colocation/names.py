"""Names that the operator's objects carry in the cluster."""

from __future__ import annotations

GROUP = "blink.dev"
VERSION = "v1alpha1"
POOLS = "tenantpools"
TENANTS = "tenants"
FINALIZER = "blink.dev/colocation"
TENANT_LABEL = "blink.dev/tenant"  # on a tenant's Job and its pods
NODE_ANNOTATION = "blink.dev/node"  # on a Job: where it was released last
CORES_ANNOTATION = "blink.dev/cores"
PART_OF_LABEL = "app.kubernetes.io/part-of"  # of Blink's own pods
PART_OF = "blink"
RDT_PREFIX = "rdt.resources.beta.kubernetes.io/"  # of containerd and CRI-O: classes of cache and memory bandwidth
RDT_ANNOTATION = f"{RDT_PREFIX}pod"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"  # Kueue admits a Job that carries it, and nobody else does
KUEUE_GROUP = "kueue.x-k8s.io"
COMPONENT_LABEL = "app.kubernetes.io/component"
SERVING_COMPONENTS = frozenset({"gateway", "engine"})
HOSTNAME_LABEL = "kubernetes.io/hostname"
