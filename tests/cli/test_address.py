from __future__ import annotations

import socket

import pytest

from services.cli.address import reserve
from services.cli.errors import CommandError


def test_port_0_becomes_a_free_port_that_workers_can_share() -> None:
    with reserve("127.0.0.1:0", 2) as address:
        port = int(address.removeprefix("127.0.0.1:"))
        with socket.socket() as worker, socket.socket() as second:
            for each in (worker, second):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                each.bind(("127.0.0.1", port))
                each.listen()
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass


def test_a_port_in_use_is_refused_even_if_its_owner_would_share_it() -> None:
    with socket.socket() as owner:
        owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        address = f"127.0.0.1:{owner.getsockname()[1]}"
        with (
            pytest.raises(CommandError, match=f"cannot listen on {address}: Address already in use"),
            reserve(address, 1),
        ):
            pass


def port_with_closed_connections(*options: int) -> int:
    """That a server with these options has just left: its side closed first, so the port is in TIME_WAIT."""
    with socket.socket() as server:
        for option in options:
            server.setsockopt(socket.SOL_SOCKET, option, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port: int = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""
    return port


LEFT_BEHIND = [
    pytest.param([], id="never used"),
    pytest.param([socket.SO_REUSEADDR], id="left by another server"),
    pytest.param([socket.SO_REUSEADDR, socket.SO_REUSEPORT], id="left by Blink"),
]


@pytest.mark.parametrize("options", LEFT_BEHIND)
def test_a_port_that_was_just_left_is_free_for_workers_and_for_one_blink_only(options: list[int]) -> None:
    port = port_with_closed_connections(*options) if options else 0
    with reserve(f"127.0.0.1:{port}", 2) as address:
        host, port = "127.0.0.1", int(address.rpartition(":")[2])
        with pytest.raises(CommandError, match="Address already in use"), reserve(address, 2):
            pass
        with socket.socket() as worker:
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                worker.setsockopt(socket.SOL_SOCKET, option, 1)
            worker.bind((host, port))
            worker.listen()
            with pytest.raises(CommandError, match="Address already in use"), reserve(address, 2):
                pass


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:http", "127.0.0.1:70000", ""])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(CommandError, match="must be host:port"), reserve(address, 1):
        pass


def test_a_unix_socket_is_for_one_worker() -> None:
    with reserve("unix:/tmp/x.sock", 1) as address:
        assert address == "unix:/tmp/x.sock"
    with pytest.raises(CommandError, match="--workers is 2"), reserve("unix:/tmp/x.sock", 2):
        pass
