"""What the engine knows of a request's salt: 128 bits, so that no two salts that anyone can find are the same to it."""

from __future__ import annotations

import hashlib


def salt_words(fingerprint: str, salt: str) -> tuple[int, int]:
    """Two u64 of SHA-256 over the model's identity (of a fixed length, hexadecimal) and the caller's salt."""
    digest = hashlib.sha256(f"{fingerprint}/{salt}".encode()).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")
