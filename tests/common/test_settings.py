from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import Field, field_validator

from services.common.settings import ProcessSettings, SettingsError


class Settings(ProcessSettings):
    process: ClassVar[str] = "gateway"

    port: int = Field(50051, ge=1, le=65535)
    host: str = "127.0.0.1"
    mode: Literal["fast", "slow"] = "fast"
    reflection: bool = True
    ratio: float = 0.5
    socket: Path | None = None
    max_prompt_tokens: int = Field(100, ge=1)

    @field_validator("host")
    @classmethod
    def _no_spaces(cls, value: str) -> str:
        if " " in value:
            raise ValueError(f"{value!r} holds a space")
        return value


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLINK_CONFIG", raising=False)


def refused(*flags: str) -> str:
    with pytest.raises(SettingsError) as caught:
        Settings.load(flags)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "blink.toml"
    config.write_text('[gateway]\nport = 1\nhost = "file"\nmax_prompt_tokens = 7\n[bootstrap]\nanything = 1\n')
    monkeypatch.setenv("BLINK_GATEWAY_PORT", "2")
    monkeypatch.setenv("BLINK_GATEWAY_HOST", "environment")
    settings = Settings.load(["--config", str(config), "--port", "3"])
    assert (settings.port, settings.host, settings.max_prompt_tokens, settings.mode) == (
        3,
        "environment",
        7,
        "fast",
    )


def test_the_file_can_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "blink.toml"
    config.write_text("[gateway]\nport = 9\n")
    monkeypatch.setenv("BLINK_CONFIG", str(config))
    assert Settings.load([]).port == 9


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--reflection", True),
        ("--no-reflection", False),
        ("--reflection=true", True),
        ("--reflection=false", False),
        ("--reflection=0", False),
        ("--reflection=on", True),
    ],
)
def test_a_switch_takes_a_value_as_every_setting_does(flag: str, value: bool) -> None:
    assert Settings.load([flag]).reflection is value


def test_direct_construction_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINK_GATEWAY_PORT", "2")
    monkeypatch.setenv("PORT", "3")
    assert Settings().port == 50051


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--port", "70000"], ["port", "70000", "65535"]),
        (["--port", "many"], ["port", "many", "integer"]),
        (["--mode", "warp"], ["mode", "warp", "fast"]),
        (["--ratio", "nan"], ["ratio", "finite"]),
        (["--host", "a b"], ["host", "'a b' holds a space"]),
        (["--reflection=maybe"], ["reflection is 'maybe', should be true or false"]),
        (["--prot", "1"], ["unknown setting prot", "did you mean port?"]),
        (["--por", "1"], ["unknown setting por", "did you mean port?"]),
        (["stray"], ["'stray'"]),
        (["--port"], ["port"]),
        (["--config"], ["config"]),
        (["--port", "0", "--max-prompt-tokens", "0"], ["port is '0'", "max_prompt_tokens is '0'"]),
    ],
)
def test_a_bad_flag_is_refused_naming_field_value_and_limit(flags: list[str], parts: list[str]) -> None:
    message = refused(*flags)
    assert all(part in message for part in parts), message


def test_a_bad_variable_is_refused_naming_field_value_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINK_GATEWAY_PORT", "-1")
    message = refused()
    assert "port is '-1'" in message
    assert "1" in message


def test_an_unknown_variable_is_refused_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINK_GATEWAY_PROT", "1")
    message = refused()
    assert "BLINK_GATEWAY_PROT" in message
    assert "port" in message


def test_another_processes_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINK_BOOTSTRAP_LANES", "1")
    assert Settings.load([]) == Settings()


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("[gateway]\nprot = 1", ["prot", "did you mean port?"]),
        ("[gateway]\nport = 0", ["port is 0", "1"]),
        ("[gate]\nport = 1", ["'gate'", "[gateway]"]),
        ("port = 1", ["'port'", "[gateway]"]),
        ("[gateway", ["blink.toml", "Expected"]),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, content: str, parts: list[str]) -> None:
    config = tmp_path / "blink.toml"
    config.write_text(content)
    message = refused("--config", str(config))
    assert all(part in message for part in parts), message


def test_a_missing_file_is_refused_by_path() -> None:
    assert refused("--config", "/nowhere/blink.toml") == (
        "gateway: config file /nowhere/blink.toml: No such file or directory"
    )
