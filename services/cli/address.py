"""The address that gateway workers share."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from services.cli.errors import CommandError

UNIX_PREFIX = "unix:"


@contextmanager
def reserve(address: str, workers: int) -> Iterator[str]:
    """Make sure that nobody else serves at ``host:port``, and keep it so; port 0 becomes a free port.

    Workers share a port by SO_REUSEPORT, which would let a second Blink share it too, without a word. So this looks
    first without that option, and then holds the port with a socket that takes no connections.

    Raises:
        CommandError: the address is malformed or in use.
    """
    if address.startswith(UNIX_PREFIX):
        if workers > 1:
            raise CommandError(f"--workers is {workers}, but a unix socket serves one worker only")
        yield address
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65_535:
        raise CommandError(f"listen is {address!r}, must be host:port with a port up to 65535, or unix:/path")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's rest is no owner
            probe.bind(target)
            target = probe.getsockname()
        holder = socket.socket(family, kind, protocol)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(target)
    except OSError as error:
        raise CommandError(f"cannot listen on {address}: {error.strerror}") from error
    with holder:
        yield f"{host}:{target[1]}"
