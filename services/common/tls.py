"""Certificates of a process that speaks TLS with both sides known: its own, its key, and whom it trusts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.common.errors import BlinkError


class TlsError(BlinkError):
    """A certificate's file can't be used."""


@dataclass(frozen=True)
class TlsMaterial:
    """PEM contents, as they were when they were read."""

    certificate: bytes  # and the intermediate ones behind it
    key: bytes
    authority: bytes  # certificates that the peer's must come from


@dataclass(frozen=True)
class TlsFiles:
    """PEM files. They are read again for every connection or handshake, so renewed ones are taken up by themselves."""

    certificate: Path
    key: Path
    authority: Path

    def read(self) -> TlsMaterial:
        """Raises TlsError naming the file that can't be read or is no PEM."""
        return TlsMaterial(_pem(self.certificate), _pem(self.key), _pem(self.authority))


def _pem(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TlsError(f"can't read {path}: {error.strerror}") from error
    if b"-----BEGIN " not in data:
        raise TlsError(f"{path} is not a PEM file: it has no line -----BEGIN ...-----")
    return data
