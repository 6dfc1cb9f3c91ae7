"""Who a caller of the handshake is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_NAMES = ("x509_subject_alternative_name", "x509_common_name")  # in order of preference


def peer_name(auth_context: Mapping[str, Iterable[bytes]]) -> str:
    """The first name in the caller's certificate, its subject's common name when it has no other.

    Empty without TLS: over the unix socket every caller is this machine's user. gRPC has checked the certificate.
    """
    for key in _NAMES:
        for name in auth_context.get(key, ()):
            return name.decode(errors="replace")
    return ""
