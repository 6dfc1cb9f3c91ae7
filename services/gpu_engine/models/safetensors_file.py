"""The safetensors container: a JSON table of tensors, then their bytes.

Format: huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.models.errors import CorruptCheckpointError

HEADER_LENGTH_BYTES = 8


@dataclass(frozen=True)
class SafetensorsEntry:
    """One tensor: its type by the format's name, and where its bytes lie in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """A mapped safetensors file.

    Attributes:
        tensors: name to entry.

    Raises:
        CorruptCheckpointError: truncated or malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise CorruptCheckpointError(f"{path}: the file is empty") from error
        header_bytes = int.from_bytes(self._map[:HEADER_LENGTH_BYTES], "little")
        self._data_start = HEADER_LENGTH_BYTES + header_bytes
        if self._data_start > len(self._map):
            raise CorruptCheckpointError(
                f"{path}: truncated or not safetensors,"
                f" the header would end at byte {self._data_start} of {len(self._map)}"
            )
        try:
            table = json.loads(self._map[HEADER_LENGTH_BYTES : self._data_start])
            self.tensors = {name: self._entry(line) for name, line in table.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(f"{path}: the safetensors header is malformed: {error!r}") from error
        for name, entry in self.tensors.items():
            if not self._data_start <= entry.start <= entry.end <= len(self._map):
                raise CorruptCheckpointError(
                    f"{path}: truncated, tensor {name} ends at byte {entry.end} of {len(self._map)}"
                )

    def bytes_of(self, entry: SafetensorsEntry) -> NDArray[np.uint8]:
        """The tensor's data, uint8 [bytes], mapped."""
        return np.frombuffer(self._map, np.uint8, entry.end - entry.start, entry.start)

    def _entry(self, line: dict[str, Any]) -> SafetensorsEntry:
        start, end = (int(offset) + self._data_start for offset in line["data_offsets"])
        return SafetensorsEntry(str(line["dtype"]), tuple(int(n) for n in line["shape"]), start, end)
