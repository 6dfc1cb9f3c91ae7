"""Addresses on the command line: where a gateway is, and where the workers of a new one listen."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.cli.errors import CommandError

UNIX_PREFIX = "unix:"
MAX_PORT = 65_535


def require_target(address: str) -> str:
    """``address`` itself when a client can call it: ``host:port`` or ``unix:/path``. Raises CommandError."""
    if not address.startswith(UNIX_PREFIX):
        _split("address", address, lowest_port=1)
    return address


@contextmanager
def reserve(address: str, workers: int, option: str = "--listen") -> Iterator[str]:
    """Make sure that nobody else serves at ``host:port``, and keep it so; port 0 becomes a free port.

    Workers share a port by SO_REUSEPORT, which would let a second Blink share it too, without a word. So this looks
    first without that option, and then holds the port with a socket that takes no connections. ``option`` is how the
    operator chooses the address.

    Raises:
        CommandError: the address is malformed or in use.
    """
    if address.startswith(UNIX_PREFIX):
        if workers > 1:
            raise CommandError(f"--workers is {workers}, but a unix socket ({option} {address}) serves one worker only")
        yield address
        return
    host, port = _split(option.removeprefix("--"), address, lowest_port=0)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's rest is no owner
            probe.bind(target)
            target = probe.getsockname()
        holder = socket.socket(family, kind, protocol)
        _hold(holder, target)
    except UnicodeError as error:  # of a host name that can't be one
        raise CommandError(f"cannot listen on {address}: {error}") from error
    except OSError as error:
        hint = f"; is another Blink running? {option} chooses another port" if error.errno == errno.EADDRINUSE else ""
        raise CommandError(f"cannot listen on {address}: {error.strerror}{hint}") from error
    with holder:
        yield f"{host}:{target[1]}"


def _hold(holder: socket.socket, target: Any) -> None:
    """Bind so that workers share the port, and a probe as above does not. Raises OSError."""
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        holder.bind(target)
    except OSError:
        # The probe found no owner, so these are connections that another server closed. The option that overlooks
        # them goes once it is bound: left on, the next probe would overlook this socket too.
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(target)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except OSError:
            holder.close()
            raise


def _split(name: str, address: str, lowest_port: int) -> tuple[str, int]:
    """Host, an IPv6 one in its brackets, and port. Raises CommandError naming the part that is wrong."""
    host, colon, port = address.rpartition(":")
    problem = ""
    if not colon:
        problem = "has no port"
    elif not host:
        problem = "has no host"
    elif ":" in host and not (host.startswith("[") and host.endswith("]")):
        problem = "has colons in its host: write an IPv6 host in brackets"
    elif not (port.isascii() and port.isdigit() and len(port) <= len(str(MAX_PORT))):
        problem = f"has port {port!r}, which is not one"
    elif not lowest_port <= int(port) <= MAX_PORT:
        problem = f"has port {port}"
    if problem:
        raise CommandError(
            f"{name} {address!r} {problem}; it must be host:port with a port from {lowest_port} to {MAX_PORT}, "
            "or unix:/path"
        )
    return host, int(port)
