from __future__ import annotations

import pytest

from services.bootstrap.settings import BootstrapSettings
from services.common.settings import SettingsError
from services.ring.schema import record_bytes


def test_the_default_arena_holds_a_full_context_for_every_slot() -> None:
    geometry = BootstrapSettings(slots_per_lane=8).geometry(context=8192)
    assert geometry.arena_bytes == 8 * record_bytes(8192, 0)


def test_the_default_arena_is_bounded_but_always_holds_two_requests() -> None:
    assert BootstrapSettings(slots_per_lane=4096, log_entries=1 << 16).geometry(8192).arena_bytes == 64 << 20
    assert BootstrapSettings(slots_per_lane=1).geometry(1 << 30).arena_bytes == 2 * record_bytes(1 << 30, 0)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--instance=A b", "instance is 'A b', must be 1 to 32"),
        ("--engine=tpu", "engine is 'tpu', should be 'cpu' or 'cuda'"),
        ("--scheduler=dpu", "scheduler is 'dpu', should be 'gpu' or 'host'"),
        ("--prefix-cache=true", "prefix_cache is 'true', should be 'exact', 'all' or 'off'"),
        ("--lanes=0", "lanes is '0', should be greater than or equal to 1"),
        ("--slots-per-lane=4096", "log_entries is 16384, must be 16405"),
        ("--rdma-mtu=1500", "rdma_mtu is 1500, must be 0 or one of 256, 512, 1024, 2048, 4096"),
        ("--transport=tcp", "transport is 'tcp', should be 'shm' or 'verbs'"),
        ("--handshake-key=k.pem", "handshake_key is given without handshake_certificate, handshake_authority"),
        ("--listen=0.0.0.0:7000", "listen is '0.0.0.0:7000': .* needs handshake_certificate"),
        ("--ring-memory=device", "ring_memory is 'device': .* not for engine 'cpu', transport 'shm'"),
        ("--arena-bytes=100", "arena_bytes is '100', should be a multiple of 64"),
    ],
)
def test_bad_values_are_refused_by_name_value_and_limit(flag: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        BootstrapSettings.load([flag])


def test_the_cuda_engine_has_larger_defaults_and_what_is_given_stays() -> None:
    cpu, cuda = BootstrapSettings(), BootstrapSettings(engine="cuda")
    assert (cpu.max_running, cpu.max_batched_tokens, cpu.kv_tokens) == (64, 256, 32_768)
    assert (cuda.max_running, cuda.max_batched_tokens, cuda.kv_tokens) == (256, 2_048, 262_144)
    assert BootstrapSettings.load(["--engine=cuda", "--max-running=64"]).max_running == 64
