"""From the credential that a call carries to who makes it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from services.dpu_gateway.access.keys import Key, KeyFile
from services.dpu_gateway.access.limits import Allowance, Limits, Meter
from services.dpu_gateway.errors import UnauthenticatedError

SCHEME = "bearer"


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever makes a call; ``key`` is None where no keys are asked for."""

    key: Key | None = None
    limits: Limits | None = None

    @property
    def name(self) -> str:
        return "" if self.key is None else self.key.name

    def admitted(self) -> AbstractContextManager[Meter]:
        """Hold this while a request of theirs is under way, and tell it of tokens. Raises OverloadedError when they may
        not have one more."""
        if self.key is None or self.limits is None:
            return nullcontext(Meter())
        return self.limits.admitted(self.key)

    def allowances(self) -> dict[str, Allowance]:
        """What is left of their rates; empty for who has none."""
        return {} if self.key is None or self.limits is None else self.limits.allowances(self.key)


ANYBODY = Caller()


class Access:
    """Everybody may call where there is no key file."""

    def __init__(self, keys: KeyFile | None = None, limits: Limits | None = None) -> None:
        self._keys = keys
        self._limits = limits

    def identify(self, authorization: str | None) -> Caller:
        """Who sent this ``Authorization`` header (or metadata). Raises UnauthenticatedError."""
        if self._keys is None:
            return ANYBODY
        scheme, _, credential = (authorization or "").partition(" ")
        if scheme.lower() != SCHEME or not credential:
            raise UnauthenticatedError("an API key is needed: send it as Authorization: Bearer KEY")
        key = self._keys.find(credential.strip())
        if key is None:
            raise UnauthenticatedError("the API key is not known here")
        return Caller(key, self._limits)

    def close(self) -> None:
        if self._limits is not None:
            self._limits.close()
