"""A packed record is what the schema says."""

from __future__ import annotations

import numpy as np
import pytest

from services.ring import dtypes, schema
from services.ring.record import pack_record

VALUES = {
    "request_id": 2**64 - 1,
    "seed": 2**63,
    "slot": 7,
    "max_tokens": 100,
    "min_tokens": 3,
    "priority": -4,
    "time_limit_ms": 250,
    "flags": 3,
    "top_logprobs": 20,
    "temperature": 0.5,
    "top_p": 0.25,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "presence_penalty": -2.0,
    "frequency_penalty": 2.0,
    "top_k": 40,
    "cache_salt": [2**64 - 1, 5],
}


def test_every_field_lands_where_the_schema_puts_it() -> None:
    record = pack_record([1, 2, 3], stop_tokens=[8, 9], **VALUES)  # type: ignore[arg-type]
    descriptor = np.frombuffer(record, dtypes.DESCRIPTOR, 1)[0]
    packed = {name: descriptor[name].tolist() for name in dtypes.DESCRIPTOR.names or ()}
    assert packed == VALUES | {"prompt_tokens": 3, "stop_token_count": 2, "stop_tokens": [8, 9] + [0] * 14}
    assert np.frombuffer(record, np.uint32, offset=schema.DESCRIPTOR.size).tolist() == [1, 2, 3]


@pytest.mark.parametrize("prompt", [list(range(131_072)), np.arange(131_072, dtype=np.uint32)])
def test_longest_prompt(prompt: list[int]) -> None:
    record = pack_record(prompt, slot=0, max_tokens=1)
    assert len(record) == schema.DESCRIPTOR.size + 4 * 131_072
    np.testing.assert_array_equal(np.frombuffer(record, np.uint32, offset=schema.DESCRIPTOR.size), prompt)


@pytest.mark.parametrize(
    "bad", [{"slot": -1}, {"max_tokens": 2**32}, {"priority": 2**31}, {"temperature": 1e300}, {"seed": -1}]
)
def test_a_value_that_does_not_fit_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        pack_record([1], **{"slot": 0, "max_tokens": 1} | bad)  # type: ignore[arg-type]


def test_a_negative_token_id_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        pack_record([1, -1], slot=0, max_tokens=1)


def test_too_many_stop_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="stop_tokens has 17 ids, at most 16"):
        pack_record([1], slot=0, max_tokens=1, stop_tokens=range(17))
