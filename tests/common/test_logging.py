from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Literal

import pytest
import structlog

from services.common.logging import bound_request, configure_logging, get_logger


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def events(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_line_with_utc_time_role_and_request_id() -> None:
    stream = io.StringIO()
    configure_logging("gateway-3", stream=stream)
    with bound_request("r-1", lane=2):
        get_logger(slot=7).info("accepted", prompt="line\nbreak")
    get_logger().info("idle")
    accepted, idle = events(stream)
    assert accepted["event"] == "accepted"
    assert accepted["role"] == "gateway-3"
    assert (accepted["request_id"], accepted["lane"], accepted["slot"]) == ("r-1", 2, 7)
    assert accepted["level"] == "info"
    assert datetime.fromisoformat(accepted["timestamp"]).utcoffset() == timedelta(0)
    assert "request_id" not in idle


def test_events_below_the_level_are_dropped() -> None:
    stream = io.StringIO()
    configure_logging("x", level="warning", stream=stream)
    get_logger().info("quiet")
    get_logger().warning("loud")
    assert [event["event"] for event in events(stream)] == ["loud"]


def test_an_exception_stays_on_one_line() -> None:
    stream = io.StringIO()
    configure_logging("x", stream=stream)
    try:
        raise ValueError("broken")
    except ValueError:
        get_logger().exception("crashed")
    (event,) = events(stream)
    assert event["exception"][0]["exc_value"] == "broken"


def test_the_standard_librarys_loggers_come_out_the_same_way() -> None:
    stream = io.StringIO()
    configure_logging("x", stream=stream)
    logging.getLogger("grpc").warning("retry %d", 3)
    logging.getLogger("grpc").info("chatter")
    (event,) = events(stream)
    assert (event["event"], event["role"], event["logger"], event["level"]) == ("retry 3", "x", "grpc", "warning")


def test_logging_goes_on_when_the_reader_is_gone() -> None:
    read, write = os.pipe()
    with io.TextIOWrapper(io.FileIO(write, "w"), write_through=True) as stream:
        configure_logging("x", stream=stream)
        os.close(read)
        get_logger().info("nobody hears this")
        logging.getLogger("library").warning("nor this")


def test_a_terminal_gets_readable_lines() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    configure_logging("gateway-0", stream=stream)
    get_logger().info("ready", port=5)
    assert not stream.getvalue().startswith("{")
    assert "ready" in stream.getvalue()


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_holds_no_local_variables(log_format: Literal["json", "console"]) -> None:
    def fail(prompt: str) -> None:
        raise ValueError("broken")

    stream = io.StringIO()
    configure_logging("x", log_format=log_format, stream=stream)
    for log in (get_logger(), logging.getLogger("grpc")):
        try:
            fail("".join(("a secret", " prompt")))  # joined here, so that the line of code does not hold it
        except ValueError:
            log.exception("crashed")
    assert stream.getvalue().count("broken") >= 2
    assert "a secret prompt" not in stream.getvalue()
