"""``blink top`` against a real gateway over the stand-in engine, and its arithmetic."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import certifi
import pytest
from rich.console import Console

from services.cli.top.render import render
from services.cli.top.scrape import Scrape, increase
from services.cli.top.snapshot import Snapshot
from tests.cli.run_blink import BLINK, assert_one_line_failure, blink
from tests.dpu_gateway.harness import Gateway, collect, gateway, max_tokens, text_request

REASONS = ("no_slot", "arena_full", "queue_full", "rate_limit", "concurrency_limit")


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Gateway, str]]:
    """A gateway, and its HTTP address by TCP: a bridge to its unix socket."""
    async with gateway() as system:

        async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                writer.write(data)
            writer.close()

        async def bridge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_unix_connection(str(system.http_socket()))
            await asyncio.gather(pipe(reader, there[1]), pipe(there[0], writer))

        server = await asyncio.start_server(bridge, "127.0.0.1", 0)
        async with server:
            yield system, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_once_as_json_has_what_happened() -> None:
    async with served() as (system, http):
        for _ in range(3):
            await collect(system.inference().Generate(text_request(stop=max_tokens(20))))
        done = await asyncio.to_thread(blink, "top", "--once", "--json", "--http", http)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert (seen["engine_state"], seen["finished"], seen["rejected"]) == ("ready", {"length": 3}, {})
    assert seen["latency"]["ttft"]["count"] == 3
    assert 0 < seen["latency"]["ttft"]["p50"] <= seen["latency"]["ttft"]["p99"]
    assert [(lane["lane"], lane["attached"], lane["tokens"]) for lane in seen["lanes"]] == [
        (0, True, 60),
        (1, False, 0),
    ]


async def test_the_live_view_fits_80_columns_and_ctrl_c_ends_it_cleanly() -> None:
    async with served() as (_, http):
        ours, theirs = pty.openpty()
        environment = {**os.environ, "COLUMNS": "80", "LINES": "30", "TERM": "xterm-256color"}
        command = [*BLINK, "top", "--interval", "0.2", "--http", http]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=theirs, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
        )
        os.close(theirs)

        def read_until(word: bytes) -> bytes:
            seen = b""
            while word not in seen:
                seen += os.read(ours, 1 << 16)
            return seen

        try:
            async with asyncio.timeout(60):
                shown = await asyncio.to_thread(read_until, b"log backlog")
                process.send_signal(signal.SIGINT)
                rest = await asyncio.to_thread(read_until, b"\x1b[?1049l")  # the terminal's own screen is back
                _, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
            os.close(ours)
    assert b"\x1b[?1049h" in shown
    assert b"\x1b[?25h" in rest  # so is its cursor
    assert (process.returncode, errors) == (0, b"")


def test_no_line_is_longer_than_80_columns() -> None:
    text = "\n".join(
        [
            'blink_engine_state{state="ready"} 1',
            "blink_kv_cache_pages 123456",
            "blink_kv_cache_usage_perc 0.5",
            'blink_lane_attached{lane="0"} 1',
            'blink_lane_generation_tokens_total{lane="0"} 123456789012',
            *(
                f'blink_requests_rejected_total{{reason="{name}"}} 12345'
                for name in ("no_slot", "arena_full", "queue_full")
            ),
        ]
    )
    stream = io.StringIO()
    Console(file=stream, width=80).print(render(Snapshot.of([Scrape.parse(text + "\n", 1.0)])))
    assert max(len(line.rstrip()) for line in stream.getvalue().splitlines()) <= 80
    assert "12345 no slot" in stream.getvalue()


def test_no_gateway_is_one_clear_line() -> None:
    done = blink("top", "--once", "--http", "127.0.0.1:1")
    assert_one_line_failure(done, "http://127.0.0.1:1", "--http", "speaks TLS needs BLINK_TLS_AUTHORITY")


def test_a_named_authority_means_tls() -> None:
    authority = {"BLINK_TLS_AUTHORITY": certifi.where()}
    done = blink("top", "--once", "--http", "127.0.0.1:1", environment=authority)
    assert_one_line_failure(done, "https://127.0.0.1:1", "BLINK_TLS_AUTHORITY is set")


def test_a_unix_socket_is_refused_by_name() -> None:
    assert_one_line_failure(blink("top", "--once", "--http", "unix:/tmp/x.sock"), "unix:/tmp/x.sock", "host:port")


def test_rates_are_over_the_time_between_readings_and_survive_a_restart() -> None:
    def reading(at: float, tokens: int) -> Scrape:
        return Scrape.parse(f"blink_generation_tokens_total {tokens}\n", at)

    assert Snapshot.of([reading(10, 100), reading(12, 200)]).generated_per_s == pytest.approx(50)
    assert increase(reading(10, 100), reading(12, 7), "blink_generation_tokens_total") == {"": 7}
    assert Snapshot.of([reading(10, 100)]).generated_per_s == 0
