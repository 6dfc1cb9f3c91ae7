"""Certificates of an authority of our own, as files that settings can name."""

from __future__ import annotations

import datetime
from pathlib import Path

import trustme

from services.common.tls import TlsFiles


class Authority:
    """Issues certificates into ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ca = trustme.CA()
        self.certificate = directory / f"{id(self):x}-ca.pem"
        self._ca.cert_pem.write_to_path(str(self.certificate))

    def issue(
        self,
        *names: str,
        common_name: str | None = None,
        trusts: Authority | None = None,
        until: datetime.datetime | None = None,
    ) -> TlsFiles:
        """A certificate for DNS names or addresses; its owner trusts this authority, or another one."""
        since = until - datetime.timedelta(days=1) if until else None
        issued = self._ca.issue_cert(*names, common_name=common_name, not_before=since, not_after=until)
        stem = f"{id(self):x}-{(names or (common_name,))[0]}"
        certificate, key = self._directory / f"{stem}.pem", self._directory / f"{stem}.key"
        key.write_bytes(issued.private_key_pem.bytes())
        certificate.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        return TlsFiles(certificate, key, (trusts or self).certificate)
