"""Both addresses of a gateway are looked at, and a Blink that serves there already is no fault."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.doctor.doctor import purpose_of
from services.cli.doctor.finding import Finding, Level
from services.cli.doctor.ports import answers_grpc, answers_http, check_ports
from tests.cli.doctor.machines import SERVER, machine
from tests.cli.run_blink import blink
from tests.dpu_gateway.harness import gateway

GRPC_TAKEN = "sl\n 0: 00000000000000000000000000000000:C383 0:0 0A"
ANY_PORT = "127.0.0.1:0"
BOTH_TAKEN = f"{GRPC_TAKEN}\n 1: 00000000000000000000000000000000:1F40 0:0 0A"


def found(root: Path, table: str, *, engine: str = "none", serving: bool = False) -> list[Finding]:
    files = SERVER | {"proc/net/tcp6": table}
    purpose = purpose_of("verbs", engine)
    return list(check_ports(machine(root, files), purpose, lambda _: serving, lambda _: serving))


def test_a_port_in_use_matters_where_clients_call(tmp_path: Path) -> None:
    grpc, http = found(tmp_path, GRPC_TAKEN)
    assert (grpc.check, grpc.level) == ("gRPC port 127.0.0.1:50051", Level.MISSING)
    assert "choose another with --listen" in grpc.advice
    assert (http.check, http.level, http.found) == ("HTTP port 127.0.0.1:8000", Level.OK, "free")
    assert {each.level for each in found(tmp_path, BOTH_TAKEN, engine="cuda")} == {Level.OK}  # nobody calls there


def test_the_http_port_is_looked_at_too(tmp_path: Path) -> None:
    levels = [(each.level, each.found) for each in found(tmp_path, BOTH_TAKEN)]
    assert levels == [(Level.MISSING, "in use, and no Blink answers there")] * 2
    assert "--http" in found(tmp_path, BOTH_TAKEN)[1].advice


def test_a_blink_that_serves_there_is_no_fault(tmp_path: Path) -> None:
    levels = [(each.level, each.found) for each in found(tmp_path, BOTH_TAKEN, serving=True)]
    assert levels == [(Level.OK, "a Blink serves here already")] * 2


@pytest.fixture
def stranger() -> Iterator[str]:
    """The address of somebody who takes connections, says nothing and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        thread = threading.Thread(target=hang_up)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_stranger_is_no_blink(stranger: str) -> None:
    assert not answers_grpc(stranger)
    assert not answers_http(stranger)


async def test_the_command_recognizes_a_real_gateway(stranger: str) -> None:
    async with gateway(listen=ANY_PORT, http_listen=ANY_PORT) as system:
        grpc, http = f"127.0.0.1:{system.workers[0].port}", f"127.0.0.1:{system.workers[0].http_port}"
        done = await asyncio.to_thread(blink, "doctor", "--json", "--listen", grpc, "--http", http)
        assert done.returncode == 0, done.stderr
        rows = {row["check"]: row["found"] for row in json.loads(done.stdout)}
        assert rows[f"gRPC port {grpc}"] == rows[f"HTTP port {http}"] == "a Blink serves here already"
        refused = await asyncio.to_thread(blink, "doctor", "--listen", grpc, "--http", stranger)
        assert refused.returncode == 1
        assert f"Next, for HTTP port {stranger}" in refused.stderr
