"""What engines tell the scheduling core of the prefix cache."""

from __future__ import annotations

import pytest

from services.gpu_engine.engine import EngineLimits


@pytest.mark.parametrize(
    ("asked_for", "decodes_exactly", "shared"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, True)],
)
def test_decoded_pages_are_shared_where_they_are_exact_or_asked_for(
    asked_for: bool, decodes_exactly: bool, shared: bool
) -> None:
    limits = EngineLimits(
        context=64,
        page_size=16,
        kv_pages=8,
        max_running=2,
        max_batched_tokens=32,
        max_waiting=4,
        lease_timeout_ms=1000,
        prefix_cache=True,
        share_decoded=asked_for,
    )
    settings, again = (limits.scheduler_settings([1], decodes_exactly=decodes_exactly) for _ in range(2))
    assert settings["cache_seed"] != again["cache_seed"]  # nobody can know it and choose prompts of one bucket
    assert settings["prefix_cache"]
    assert settings["share_decoded"] is shared
