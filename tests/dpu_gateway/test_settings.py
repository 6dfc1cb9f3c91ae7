from __future__ import annotations

import pytest

from services.common.settings import SettingsError
from services.dpu_gateway.settings import GatewaySettings


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--worker=300"], "worker is"),
        (["--heartbeat-timeout=0"], "heartbeat_timeout is"),
        (["--drain-limit=nan"], "drain_limit is"),
        (["--instance=Bad Name"], "instance is 'Bad Name', must be 1 to 32"),
        (["--poll-fast-us=5000"], "poll_slow_us is 2000, must be at least poll_fast_us, 5000"),
        (["--bootstrap=host-a:7000"], "bootstrap is 'host-a:7000': .* TLS, which needs handshake_certificate"),
        (["--model-fingerprint=ABC"], "model_fingerprint is 'ABC'"),
        (["--handshake-authority=ca.pem"], "handshake_authority is given without handshake_certificate, handshake_key"),
        (["--max-message-bytes=1"], "max_message_bytes is"),
    ],
)
def test_a_bad_value_is_refused_by_the_fields_name(flags: list[str], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        GatewaySettings.load(flags)


def test_a_workers_name_is_stable_and_its_own() -> None:
    first, second = GatewaySettings(worker=0), GatewaySettings(worker=1)
    assert first.lane_owner == GatewaySettings(worker=0).lane_owner != second.lane_owner
    assert GatewaySettings(gateway_id="dpu-7/0").lane_owner == "dpu-7/0"


def test_tokenizer_threads_default_to_the_cpus_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.dpu_gateway.settings.available_cpus", lambda: 3)
    assert GatewaySettings().tokenizer_threads == 3
    assert GatewaySettings(encode_threads=1).tokenizer_threads == 1
