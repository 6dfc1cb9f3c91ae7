"""A ring whose areas lie in different memories, as one transport sees it."""

from __future__ import annotations

from services.ring.transport import Transport


class PartedTransport(Transport):
    """``first`` reaches what lies below its size, ``rest`` what lies behind, from its own start on."""

    def __init__(self, first: Transport, rest: Transport) -> None:
        super().__init__(first.size + rest.size)
        self._first, self._rest = first, rest

    def write(self, offset: int, data: bytes, *, flag: bool = False) -> None:
        transport, inside = self._at(offset)
        transport.write(inside, data, flag=flag)

    def read(self, offset: int, length: int) -> bytes:
        transport, inside = self._at(offset)
        return transport.read(inside, length)

    def flush(self) -> None:
        self._first.flush()
        self._rest.flush()

    def close(self) -> None:
        self._first.close()
        self._rest.close()

    def _at(self, offset: int) -> tuple[Transport, int]:
        return (self._first, offset) if offset < self._first.size else (self._rest, offset - self._first.size)
