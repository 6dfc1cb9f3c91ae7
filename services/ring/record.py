"""Packing a request into its arena record: descriptor, then prompt."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.ring import schema

_CODES = {"u32": "I", "i32": "i", "f32": "f", "u64": "Q"}
_FORMAT = struct.Struct(
    "<" + "".join(f"{f.count if f.count > 1 else ''}{_CODES[f.type]}" for f in schema.DESCRIPTOR.fields)
)
_PADDING = bytes(schema.DESCRIPTOR.size - _FORMAT.size)
_NO_STOP_TOKENS = (0,) * schema.MAX_STOP_TOKENS


def pack_record(
    prompt: Sequence[int] | npt.NDArray[np.uint32],
    *,
    slot: int,
    max_tokens: int,
    request_id: int = 0,
    seed: int = 0,
    min_tokens: int = 0,
    priority: int = 0,
    time_limit_ms: int = 0,
    flags: int = 0,
    top_logprobs: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    top_k: int = 0,
    stop_tokens: Sequence[int] = (),
    cache_salt: tuple[int, int] = (0, 0),
) -> bytes:
    """The bytes that a gateway writes at the record's offset; the room for max_tokens stays unwritten.

    Args mirror ``schema.DESCRIPTOR``, which states their meaning; ``flags`` are DescriptorFlag. Only what would not
    fit the layout is refused here: the meaning of values is the gateway's to validate, and the engine's again.

    Raises:
        ValueError: a value does not fit its field, or there are more than MAX_STOP_TOKENS stop tokens.
    """
    if len(stop_tokens) > schema.MAX_STOP_TOKENS:
        raise ValueError(f"stop_tokens has {len(stop_tokens)} ids, at most {schema.MAX_STOP_TOKENS} fit")
    try:
        ids = np.asarray(prompt, np.uint32)
        descriptor = _FORMAT.pack(
            request_id,
            seed,
            slot,
            ids.size,
            max_tokens,
            min_tokens,
            priority,
            time_limit_ms,
            flags,
            top_logprobs,
            temperature,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            top_k,
            len(stop_tokens),
            *stop_tokens,
            *_NO_STOP_TOKENS[len(stop_tokens) :],
            *cache_salt,
        )
    except (struct.error, OverflowError) as error:
        raise ValueError(f"a value of the request does not fit its descriptor field: {error}") from error
    return b"".join((descriptor, _PADDING, ids.tobytes()))
