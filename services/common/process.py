"""How every Blink process starts and ends: settings, logs, one line for a failure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from services.common.errors import BlinkError
from services.common.logging import configure_logging, get_logger
from services.common.settings import ProcessSettings

SettingsT = TypeVar("SettingsT", bound=ProcessSettings)


def run_process(
    settings_type: type[SettingsT], main: Callable[[SettingsT], int], arguments: Sequence[str] | None = None
) -> NoReturn:
    """Load settings, configure logs, print the settings as one event, run ``main`` and exit with its code.

    A ``BlinkError`` becomes one ``failed`` event and its exit code (2 for bad settings);
    any other exception is a fault of ours: logged with its traceback, exit code 70.
    """
    try:
        settings = settings_type.load(arguments)
    except BlinkError as error:
        configure_logging(settings_type.process)
        get_logger().error("failed", error=str(error))
        sys.exit(error.exit_code)
    configure_logging(settings.process, settings.log_level, settings.log_format)
    log = get_logger()
    log.info("settings", **settings.model_dump(mode="json"))
    try:
        code = main(settings)
    except BlinkError as error:
        log.error("failed", error=str(error))
        code = error.exit_code
    except Exception:
        log.exception("crashed")
        code = 70
    sys.exit(code)
