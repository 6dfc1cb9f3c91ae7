"""Whose request ids are in use on this worker, and which of those requests are to end."""

from __future__ import annotations

from services.dpu_gateway.errors import FieldError
from services.dpu_gateway.streams import RequestName, Stream


class Claim:
    """A name that one request holds, also while it is not in the lane: before it is submitted and between two tries.

    Attributes:
        stream: of its last try.
        aborted: somebody wants it to end.
    """

    __slots__ = ("aborted", "name", "stream")

    def __init__(self, name: RequestName) -> None:
        self.name = name
        self.stream: Stream | None = None
        self.aborted = False


class Names:
    """Each name is one request's at most."""

    def __init__(self) -> None:
        self._claims: dict[RequestName, Claim] = {}

    def claim(self, name: RequestName) -> Claim:
        """Raises FieldError when another request holds it."""
        if name in self._claims:
            raise FieldError("request_id", f"{name.request_id!r} is in use by a running request")
        claim = self._claims[name] = Claim(name)
        return claim

    def find(self, name: RequestName) -> Claim | None:
        return self._claims.get(name)

    def free(self, claim: Claim) -> None:
        """The next may have the name. Nothing happens when it may already, whoever has it now."""
        if self._claims.get(claim.name) is claim:
            del self._claims[claim.name]

    def free_of(self, stream: Stream) -> None:
        """The same for the claim whose last try ``stream`` is."""
        claim = self._claims.get(stream.name)
        if claim is not None and claim.stream is stream:
            del self._claims[stream.name]
