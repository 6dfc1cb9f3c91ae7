"""Each side alone: the commands hand everything on to the processes."""

from __future__ import annotations

import pytest

from tests.cli.run_blink import blink


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("engine", ("--model", "--transport", "--handshake-certificate", "BLINK_BOOTSTRAP_NAME")),
        ("gateway", ("--bootstrap", "--transport", "--rdma-device", "BLINK_GATEWAY_NAME")),
    ],
)
def test_help_is_the_processes_own(command: str, words: tuple[str, ...]) -> None:
    done = blink(command, "--help")
    assert done.returncode == 0
    assert all(word in done.stdout for word in words)


@pytest.mark.parametrize(("command", "field"), [("engine", "lanes"), ("gateway", "worker")])
def test_a_bad_setting_ends_with_the_processes_exit_code_and_message(command: str, field: str) -> None:
    done = blink(command, f"--{field}=x")
    assert done.returncode == 2
    assert f"{field} is 'x'" in done.stderr
