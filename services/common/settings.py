"""One typed settings object per process: flags over environment over file over defaults.

A process named ``gateway`` reads its flag ``--max-prompt-tokens``, the variable ``BLINK_GATEWAY_MAX_PROMPT_TOKENS``
and the key ``max_prompt_tokens`` in the table ``[gateway]`` of a TOML file (``--config`` or ``BLINK_CONFIG``).
Settings are flat and immutable, and anything unknown or out of range is refused by name.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Self

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliSettingsSource, EnvSettingsSource, PydanticBaseSettingsSource
from pydantic_settings import SettingsError as PydanticSettingsError

from services.common.errors import BlinkError

PROCESSES = ("bootstrap", "gateway", "operator")  # the tables that a configuration file may have
CONFIG_VARIABLE = "BLINK_CONFIG"

_SWITCH = TypeAdapter(bool)


class SettingsError(BlinkError):
    """A setting that is unknown, missing or out of range."""

    exit_code = 2


class _FlagParser(argparse.ArgumentParser):
    """argparse prints a page and exits; here a bad flag is one line like any bad setting."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        values, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise SettingsError(f"{self.prog.removeprefix('blink-')}: {self._unknown(unknown[0])}")
        return values

    def _unknown(self, argument: str) -> str:
        if not argument.startswith("--"):
            return f"unexpected argument {argument!r}"
        known = [option.removeprefix("--").replace("-", "_") for option in self._option_string_actions]
        name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
        return f"unknown setting {name}{_suggestion(name, known)}"

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{self.prog.removeprefix('blink-')}: {message}")


class ProcessSettings(BaseSettings, extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False):
    """Base of every process's settings. Constructed directly, it reads nothing but its arguments (for tests)."""

    process: ClassVar[str]

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe event logged")
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="auto is console on a terminal, else json"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    @classmethod
    def load(cls, arguments: Sequence[str] | None = None) -> Self:
        """Read flags (``sys.argv`` when None), environment and file.

        Raises:
            SettingsError: a value is unknown or refused; the message is one line with field, value and limit.
            SystemExit: with code 0, after ``--help``.
        """
        arguments = list(sys.argv[1:] if arguments is None else arguments)
        config_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        config_parser.add_argument("--config", type=Path, default=os.environ.get(CONFIG_VARIABLE))
        try:
            config, flags = config_parser.parse_known_args(arguments)
        except argparse.ArgumentError as error:
            raise SettingsError(f"{cls.process}: {error}") from error
        values = cls._file_values(Path(config.config)) if config.config else {}
        values |= cls._environment_values()
        values |= cls._flag_values(flags)
        try:
            return cls(**values)
        except ValidationError as error:
            problems = "; ".join(_describe(problem, cls.model_fields) for problem in error.errors())
            raise SettingsError(f"{cls.process}: {problems}") from error

    @classmethod
    def _file_values(cls, path: Path) -> dict[str, Any]:
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingsError(f"{cls.process}: config file {path}: {error.strerror}") from error
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SettingsError(f"{cls.process}: config file {path}: {error}") from error
        for name, table in content.items():
            if name not in PROCESSES or not isinstance(table, dict):
                known = ", ".join(f"[{process}]" for process in PROCESSES)
                raise SettingsError(f"{cls.process}: config file {path}: {name!r} is not one of the tables {known}")
        return dict(content.get(cls.process, {}))

    @classmethod
    def _environment_values(cls) -> dict[str, Any]:
        prefix = f"BLINK_{cls.process.upper()}_"
        for variable in os.environ:
            name = variable.removeprefix(prefix).lower()
            if variable.startswith(prefix) and name not in cls.model_fields:
                raise SettingsError(f"{cls.process}: unknown variable {variable}{_suggestion(name, cls.model_fields)}")
        try:
            return EnvSettingsSource(cls, env_prefix=prefix)()
        except PydanticSettingsError as error:
            raise SettingsError(f"{cls.process}: environment: {error}") from error

    @classmethod
    def _flag_values(cls, flags: Sequence[str]) -> dict[str, Any]:
        parser = _FlagParser(
            allow_abbrev=False,
            prog=f"blink-{cls.process}",
            description=cls.__doc__,
            epilog=f"--config FILE (or {CONFIG_VARIABLE}) names a TOML file with a table [{cls.process}]; "
            f"every setting is also a variable BLINK_{cls.process.upper()}_NAME.",
        )
        source: CliSettingsSource[Any] = CliSettingsSource(
            cls,
            cli_parse_args=False,
            root_parser=parser,
            parse_args_method=_FlagParser.parse_args,
            cli_exit_on_error=False,
            cli_kebab_case=True,
            cli_hide_none_type=True,
            cli_implicit_flags=True,
        )
        try:
            return dict(source(args=cls._switches_told_apart(flags))())
        except PydanticSettingsError as error:
            raise SettingsError(f"{cls.process}: {error}") from error

    @classmethod
    def _switches_told_apart(cls, flags: Sequence[str]) -> list[str]:
        """``--name=false`` of a switch, as ``blink up --set`` writes every setting, is argparse's ``--no-name``."""
        told = []
        for flag in flags:
            name, equals, value = flag.removeprefix("--").partition("=")
            field = cls.model_fields.get(name.replace("-", "_"))
            if flag.startswith("--") and equals and field is not None and field.annotation is bool:
                try:
                    told.append(f"--{name}" if _SWITCH.validate_python(value) else f"--no-{name}")
                except ValidationError:
                    raise SettingsError(
                        f"{cls.process}: {name.replace('-', '_')} is {value!r}, should be true or false"
                    ) from None
            else:
                told.append(flag)
        return told


def _describe(problem: ErrorDetails, fields: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in problem["loc"]) or "settings"
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {name}{_suggestion(name, fields)}"
    if problem["type"] == "missing":
        return f"{name} is required"
    limit = problem["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return f"{name}: {limit}" if problem["type"] == "value_error" else f"{name} is {problem['input']!r}, {limit}"


def _suggestion(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
