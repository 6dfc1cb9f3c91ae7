"""How every Blink process starts and ends: settings, logs, one line for a failure, no life without its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from services.common.errors import BlinkError
from services.common.logging import configure_logging, get_logger
from services.common.settings import ProcessSettings

SettingsT = TypeVar("SettingsT", bound=ProcessSettings)

PARENT_VARIABLE = "BLINK_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def run_process(
    settings_type: type[SettingsT],
    main: Callable[[SettingsT], int],
    arguments: Sequence[str] | None = None,
    role: Callable[[SettingsT], str] = lambda settings: settings.process,
) -> NoReturn:
    """Load settings, configure logs, print the settings as one event, run ``main`` and exit with its code.

    A ``BlinkError`` becomes one ``failed`` event and its exit code (2 for bad settings); any other exception is a
    fault of ours: logged as ``crashed`` with its traceback, exit code 70. ``role`` names the process in its logs.
    """
    try:
        stop_with_parent()
        settings = settings_type.load(arguments)
    except BlinkError as error:
        configure_logging(settings_type.process)
        get_logger().error("failed", error=str(error))
        _exit(error.exit_code)
    configure_logging(role(settings), settings.log_level, settings.log_format)
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
    _exit(code)


def _exit(code: int) -> NoReturn:
    """End the process, without the interpreter's shutdown when daemon threads still run.

    The shutdown would free what such a thread, for example an engine that is still loading, is using in native code.
    """
    if any(thread.daemon for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def stop_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent ends, however it ends. Does nothing unless a parent asked for it.

    A parent asks by putting its own process id into ``BLINK_PARENT_PID``; it must start the process from its main
    thread, as the kernel watches the thread.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):
        raise BlinkError("the process that started this one has already ended")
