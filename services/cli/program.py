"""How the user calls this program, for messages that tell what to type next."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_HTTP_ADDRESS = "127.0.0.1:8000"
ADDRESS_VARIABLE = "BLINK_ADDRESS"
HTTP_ADDRESS_VARIABLE = "BLINK_HTTP_ADDRESS"
API_KEY_VARIABLE = "BLINK_API_KEY"
AUTHORITY_VARIABLE = "BLINK_TLS_AUTHORITY"


def command(*words: str) -> str:
    """A command line that works where this one did: ``blink`` may not be on the PATH, as in a virtual environment."""
    called = sys.argv[0]
    if Path(called).name == "__main__.py":
        name = "python -m services.cli"
    elif (found := shutil.which("blink")) and Path(found).resolve() == Path(called).resolve():
        name = "blink"
    else:
        name = called
    return " ".join((name, *words))


def address_flag(address: str) -> tuple[str, ...]:
    """What a client command needs to find ``address``: nothing when it looks there anyway."""
    return () if address == os.environ.get(ADDRESS_VARIABLE, DEFAULT_ADDRESS) else ("--address", address)


def tls_hint() -> str:
    """What else may be why nothing answers, for the end of a message: one side speaks TLS, the other does not."""
    if os.environ.get(AUTHORITY_VARIABLE):
        return f"; {AUTHORITY_VARIABLE} is set, so it must speak TLS with a certificate from there"
    return f"; one that speaks TLS needs {AUTHORITY_VARIABLE}"
