"""Command lines that no command can obey: one line each, whatever is wrong with them."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer

from services.bootstrap.settings import BootstrapSettings
from services.cli.main import app, main
from services.cli.program import DEFAULT_ADDRESS, DEFAULT_HTTP_ADDRESS
from services.dpu_gateway.settings import GatewaySettings
from tests.cli.run_blink import blink

ABSURD = ["1e300", "-1e300", "nan", "inf", "-inf", "-1", "0", "0.5", "1e-300", str(10**30), "9" * 5000, "", "x", "٣"]
NOWHERE = "127.0.0.1:1"
COMMANDS = {
    "generate": ["generate", "hello", "--raw", "--address", NOWHERE],
    "status": ["status", "--address", NOWHERE],
    "up": ["up", "--model", "/nowhere.gguf"],
}
TEXT_OPTIONS = {
    "address",
    "model",
    "engine",
    "instance",
    "listen",
    "http",
    "sample",
    "settings",
    "prompt",
    "system",
    "request_id",
}


def value_options() -> list[tuple[str, str]]:
    """Every option that takes a number: command and flag, found by asking the commands themselves."""
    found = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for parameter in getattr(command, "params", ()):
            takes_value = not getattr(parameter, "is_flag", False)
            if name in COMMANDS and takes_value and parameter.name not in TEXT_OPTIONS | {"stop", "help"}:
                found.append((name, parameter.opts[0]))
    return found


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The command in this process: exit code and stderr."""
    monkeypatch.setattr("sys.argv", ["/usr/bin/blink", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err


def test_there_are_numbers_to_try() -> None:
    assert len(value_options()) == 16


@pytest.mark.parametrize(("command", "flag"), value_options())
def test_an_absurd_number_is_one_line(
    command: str, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ABSURD:
        code, stderr = run([*COMMANDS[command], f"{flag}={value}"], monkeypatch, capsys)
        assert code in {1, 2}, (value, stderr)
        assert len(stderr.splitlines()) == 1, (value, stderr)


@pytest.mark.parametrize("flag", ["--system", "--stop", "--model", "--request-id", "--address"])
def test_text_that_is_not_utf8_is_one_line_that_names_the_option(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, stderr = run(["generate", "x", "--raw", "--address", NOWHERE, f"{flag}=a\udcff"], monkeypatch, capsys)
    assert code in {1, 2}
    assert len(stderr.splitlines()) == 1
    assert flag.removeprefix("--") in stderr


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("localhost", "has no port"),
        ("nonsense:x", "has port 'x'"),
        ("host:0", "from 1 to 65535"),
        ("host:70000", "has port 70000"),
        ("host:²", "has port '²'"),
        (":50051", "has no host"),
        ("::1:50051", "in brackets"),
        ("", "has no port"),
    ],
)
def test_what_is_wrong_with_an_address_is_said(
    address: str, problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["status"], ["generate", "x"]):
        code, stderr = run([*command, "--address", address], monkeypatch, capsys)
        assert (code, len(stderr.splitlines())) == (1, 1)
        assert f"address {address!r} {problem}" in stderr or problem in stderr


@pytest.mark.parametrize("address", ["[::1]:1", "unix:/nowhere/x.sock", f"unix:/{'x' * 200}", "a.invalid:1"])
def test_an_address_where_nobody_answers_is_one_line(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, stderr = run(["status", "--address", address], monkeypatch, capsys)
    assert (code, len(stderr.splitlines())) == (1, 1)
    assert address in stderr


def test_help_tells_the_defaults_that_hold() -> None:
    shown = " ".join(blink("up", "--help", environment={"COLUMNS": "200"}).stdout.split())
    bootstrap, gateway = BootstrapSettings(), GatewaySettings()
    for default in (bootstrap.model, bootstrap.engine, bootstrap.instance, gateway.listen, gateway.http_listen):
        assert f"[default: ({default})]" in shown
    assert (gateway.listen, gateway.http_listen) == (DEFAULT_ADDRESS, DEFAULT_HTTP_ADDRESS)


@pytest.mark.parametrize(
    ("variable", "command"),
    [
        ("BLINK_ADDRESS", ["status"]),
        ("BLINK_ADDRESS", ["generate", "x"]),
        ("BLINK_ADDRESS", ["bench"]),
        ("BLINK_HTTP_ADDRESS", ["top", "--once"]),
    ],
)
def test_every_client_looks_where_the_environment_says(variable: str, command: list[str]) -> None:
    done = blink(*command, environment={variable: "127.0.0.1:1"})
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr


def test_no_message_names_a_package_of_somebody_elses() -> None:
    """Blink is not on PyPI: what pip finds there under its name is a stranger's."""
    services = Path(__file__).parents[2] / "services"
    assert [path for path in services.rglob("*.py") if "pip install 'blink" in path.read_text()] == []


def test_the_version_is_the_packages() -> None:
    assert blink("--version").stdout == f"blink {version('blink')}\n"


def test_an_interrupt_while_it_imports_prints_no_traceback() -> None:
    program = """
import builtins, os, signal, sys
imports = builtins.__import__
def interrupted(name, *rest, **named):
    if name == "services.cli.main":
        os.kill(os.getpid(), signal.SIGINT)
    return imports(name, *rest, **named)
builtins.__import__ = interrupted
import runpy
runpy.run_module("services.cli", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
