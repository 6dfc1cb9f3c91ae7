"""``blink key new``: an API key for a caller, and the lines that let a gateway recognize it."""

from __future__ import annotations

import sys

from services.cli.errors import CommandError
from services.dpu_gateway.access.keys import NAME, new_key


def new(name: str, **limits: float | None) -> None:
    """Print the key to stderr and the lines to stdout, so that a file they are written to never holds the key.

    ``limits`` are the key file's; None sets none. Raises CommandError for a name that it could not hold.
    """
    if not NAME.fullmatch(name):
        raise CommandError(f"name {name!r} must be 1 to 64 of A-Z, a-z, 0-9, _, . and -")
    key, digest = new_key()
    print(f"Give the caller this key. It is not stored, so it cannot be shown again:\n{key}", file=sys.stderr)
    print("The file that gateway.api_keys names needs these lines:", file=sys.stderr, flush=True)
    print(f'["{name}"]\nsha256 = "{digest}"')
    for limit, value in limits.items():
        if value is not None:
            print(f"{limit} = {value:.15g}")
