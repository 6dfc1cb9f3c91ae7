"""What is read of a pod's template, which may be anything, and of a node's taints."""

from __future__ import annotations

from typing import Any

import pytest

from services.colocation.decision.demands import Demands, Taint, Toleration
from services.colocation.observe.demands import demands_of, taints_of


def test_selector_and_tolerations_are_taken_as_they_are_written() -> None:
    spec = {"nodeSelector": {"b": "2", "a": "1"}, "tolerations": [{"key": "k", "operator": "Exists"}]}
    assert demands_of(spec) == Demands((("a", "1"), ("b", "2")), (Toleration("k", "Exists", "", ""),))


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"nodeSelector": None, "tolerations": None},
        {"nodeSelector": ["a"], "tolerations": {"key": "k"}},
        {"nodeSelector": {"a": {"b": 1}}, "tolerations": ["k", 7, None]},
    ],
)
def test_what_is_none_demands_nothing(spec: Any) -> None:
    assert demands_of(spec) == Demands()


def test_a_taint_that_only_says_what_is_preferred_keeps_nobody_away() -> None:
    taints = [{"key": "a", "effect": "PreferNoSchedule"}, {"key": "b", "value": "v", "effect": "NoExecute"}]
    assert taints_of({"taints": taints}) == (Taint("b", "v", "NoExecute"),)
    assert taints_of({}) == ()
