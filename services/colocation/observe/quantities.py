"""CPU quantities, and what a pod asks for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from services.colocation.errors import InvalidObjectError


def millicores(quantity: str | int | float | Decimal) -> int:
    """``quantity`` of CPU in whole millicores, rounded up as the scheduler does. Raises InvalidObjectError."""
    try:
        return math.ceil(Decimal(parse_quantity(quantity)) * 1000)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise InvalidObjectError(f"CPU quantity {quantity!r} is not one") from error


def pod_millicores(pod: Mapping[str, Any]) -> int:
    """CPU that the scheduler counts for a pod.

    All containers and restartable init containers run at once; each other init container runs beside the restartable
    ones before it. The larger of the two counts, with the runtime class's overhead; a pod-level request replaces both.
    A pod that is being resized holds the larger of what it has and what it asks for.
    """
    spec = pod.get("spec") or {}
    status = pod.get("status") or {}
    actual = {each["name"]: each for each in status.get("containerStatuses") or ()}
    main = sum(
        max(cpu_request(each), cpu_request(actual.get(each["name"], {}))) for each in spec.get("containers") or ()
    )
    sidecars = peak = 0
    for each in spec.get("initContainers") or ():
        if each.get("restartPolicy") == "Always":
            sidecars += cpu_request(each)
            peak = max(peak, sidecars)
        else:
            peak = max(peak, sidecars + cpu_request(each))
    own = max(main + sidecars, peak)
    whole = cpu_request(spec)
    return (whole or own) + millicores((spec.get("overhead") or {}).get("cpu", 0))


def cpu_request(holder: Mapping[str, Any]) -> int:
    """Millicores that a container, or a pod as a whole, asks for."""
    return millicores(((holder.get("resources") or {}).get("requests") or {}).get("cpu", 0))


def total(pods: Iterable[Mapping[str, Any]]) -> int:
    """Millicores of several pods."""
    return sum(pod_millicores(pod) for pod in pods)
