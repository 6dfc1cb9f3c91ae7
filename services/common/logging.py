"""Structured logs: JSON lines on stderr, or readable ones when stderr is a terminal.

Every event carries a UTC timestamp, the process's role and whatever the running task bound with ``bound_request``.
Events of libraries that use the standard library's logging take the same way out. Tracebacks carry no local
variables: those of a request hold its prompt.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from contextlib import AbstractContextManager
from typing import Any, Literal, TextIO, cast

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

Logger = FilteringBoundLogger


class _Unbreakable(io.TextIOBase):
    """A stream whose reader may go away: a process must be able to drain after whoever read its log was killed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def isatty(self) -> bool:
        return self._stream.isatty()

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def get_logger(**values: Any) -> Logger:
    """A logger whose events carry ``values``; usable before ``configure_logging`` ran."""
    logger: Logger = structlog.get_logger(**values)
    return logger


def bound_request(request_id: str, **values: Any) -> AbstractContextManager[None]:
    """Every event of this task within the context carries the request's id (and ``values``)."""
    return structlog.contextvars.bound_contextvars(request_id=request_id, **values)


def configure_logging(
    role: str,
    level: str = "info",
    log_format: Literal["auto", "json", "console"] = "auto",
    stream: TextIO | None = None,
) -> None:
    """Send this process's events to ``stream`` (stderr when None).

    Args:
        role: who speaks, for example ``bootstrap`` or ``gateway-0``; in every event.
        level: the least severe level that is written: debug, info, warning or error.
        log_format: ``auto`` is ``console`` when the stream is a terminal, else ``json``.
        stream: where to write.
    """
    out = _Unbreakable(sys.stderr if stream is None else stream)
    console = log_format == "console" or (log_format == "auto" and out.isatty())
    threshold = logging.getLevelNamesMapping()[level.upper()]
    process_id = os.getpid()

    def add_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["role"] = role
        event["pid"] = process_id
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_process,
    ]
    render: list[Processor] = (
        [structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback)]
        if console
        else [
            structlog.processors.StackInfoRenderer(),
            structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ]
    )
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, out)),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(threshold, logging.WARNING))  # a library's chatter is not the operator's business
