"""TLS for both ports out of one set of files, taken anew when they are replaced."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc

from services.common.errors import BlinkError
from services.common.logging import get_logger


class TlsError(BlinkError):
    """The files give no usable TLS configuration."""


class IngressTls:
    """Certificate chain, its key, and for mutual TLS the authorities whose clients are let in; all PEM files.

    They are looked at when a client connects: a connection that is made after a rotation gets the new certificate, open
    ones go on. Files that do not fit together, as in the middle of a rotation, leave the old ones in force.

    Raises TlsError when they do not fit together at the start.
    """

    def __init__(self, certificate: Path, key: Path, client_authority: Path | None) -> None:
        self._certificate = certificate
        self._key = key
        self._client_authority = client_authority
        self._refused: _Stamp | None = None  # said once
        self._stamp = self._look()
        try:
            self._context, self._pem = self._load()
        except (OSError, ssl.SSLError) as error:
            raise TlsError(f"tls_certificate {certificate}, tls_key {key}: {error}") from error

    def http(self) -> ssl.SSLContext:
        """A context that stands for the newest files."""
        return _Newest(self)

    def grpc(self) -> grpc.ServerCredentials:
        """Credentials that stand for the newest files."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._fetch, require_client_authentication=self._client_authority is not None
        )

    def newest(self) -> ssl.SSLContext:
        """The context of the files as they are now, or as they last fitted together."""
        self._refresh()
        return self._context

    def _fetch(self) -> Any:
        """For gRPC, which asks in a thread of its own before each handshake."""
        self._refresh()
        return self._configuration()

    def _configuration(self) -> Any:
        """A grpc.ServerCertificateConfiguration, a class without a public name."""
        certificate, key, client_authority = self._pem
        return grpc.ssl_server_certificate_configuration([(key, certificate)], client_authority)

    def _refresh(self) -> None:
        stamp = self._look()
        if stamp in (self._stamp, self._refused):
            return
        log = get_logger(certificate=str(self._certificate))
        try:
            self._context, self._pem = self._load()
        except (OSError, ssl.SSLError) as error:
            self._refused = stamp
            log.warning("tls_files_refused", reason=str(error))
            return
        self._stamp = stamp
        log.info("tls_files_taken")

    def _look(self) -> _Stamp:
        """What changes when any of the files does; a file that is gone has none."""
        stamps = []
        for path in (self._certificate, self._key, self._client_authority):
            try:
                status = None if path is None else path.stat()
            except OSError:
                status = None
            stamps.append(None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(stamps)

    def _load(self) -> tuple[ssl.SSLContext, _Pem]:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._certificate, self._key)
        client_authority = None
        if self._client_authority is not None:
            context.load_verify_locations(self._client_authority)
            context.verify_mode = ssl.CERT_REQUIRED
            client_authority = self._client_authority.read_bytes()
        return context, (self._certificate.read_bytes(), self._key.read_bytes(), client_authority)


_Stamp = tuple[tuple[int, int, int] | None, ...]
_Pem = tuple[bytes, bytes, bytes | None]


class _Newest(ssl.SSLContext):
    """Event loops keep the context that they were given; this one lets another make each connection's session."""

    _files: IngressTls

    def __new__(cls, files: IngressTls) -> _Newest:  # SSLContext's own takes no arguments of ours
        self = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        self._files = files
        return self

    def __init__(self, files: IngressTls) -> None:
        super().__init__()

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        return self._files.newest().wrap_bio(*arguments, **named)
