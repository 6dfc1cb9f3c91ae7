"""Which command line a message tells the user to type."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.program import address_flag, command, tls_hint


def test_a_command_is_called_as_the_user_called_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "blink"
    script.write_text("")
    script.chmod(0o755)
    monkeypatch.setattr("sys.argv", [str(script)])
    monkeypatch.setenv("PATH", "/nowhere")
    assert command("up") == f"{script} up"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command("up") == "blink up"
    monkeypatch.setattr("sys.argv", ["/x/services/cli/__main__.py"])
    assert command("up", "--help") == "python -m services.cli up --help"


def test_an_address_is_told_unless_clients_look_there_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLINK_ADDRESS", raising=False)
    assert address_flag("127.0.0.1:50051") == ()
    assert address_flag("127.0.0.1:50052") == ("--address", "127.0.0.1:50052")
    monkeypatch.setenv("BLINK_ADDRESS", "127.0.0.1:50052")
    assert address_flag("127.0.0.1:50052") == ()
    assert address_flag("127.0.0.1:50051") == ("--address", "127.0.0.1:50051")


def test_what_answers_nobody_may_speak_tls_or_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLINK_TLS_AUTHORITY", raising=False)
    assert tls_hint() == "; one that speaks TLS needs BLINK_TLS_AUTHORITY"
    monkeypatch.setenv("BLINK_TLS_AUTHORITY", "/tmp/ca.pem")
    assert tls_hint().startswith("; BLINK_TLS_AUTHORITY is set, so it must speak TLS")
