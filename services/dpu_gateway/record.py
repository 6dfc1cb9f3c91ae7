"""A validated request as the record that the engine reads (docs/ring.md)."""

from __future__ import annotations

import hashlib

from services.dpu_gateway.cache_salt import salt_words
from services.dpu_gateway.request import Request
from services.ring.record import pack_record
from services.ring.schema import DescriptorFlag


def record_of(request: Request, slot: int, prompt: list[int], max_tokens: int, fingerprint: str) -> bytes:
    """The bytes that ``Session.submit`` writes into the arena. ``fingerprint``: of the model, hexadecimal."""
    sampling = request.sampling
    flags = DescriptorFlag(0)
    if request.ignore_eos:
        flags |= DescriptorFlag.IGNORE_EOS
    if request.logprobs is not None:
        flags |= DescriptorFlag.LOGPROBS
    if request.no_prefix_cache:
        flags |= DescriptorFlag.NO_PREFIX_CACHE
    return pack_record(
        prompt,
        slot=slot,
        max_tokens=max_tokens,
        request_id=int.from_bytes(hashlib.blake2b(request.request_id.encode(), digest_size=8).digest()),
        seed=request.seed,
        min_tokens=request.min_tokens,
        priority=request.priority,
        time_limit_ms=request.time_limit_ms,
        flags=flags,
        top_logprobs=request.logprobs or 0,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        top_k=sampling.top_k,
        stop_tokens=request.stop_token_ids,
        cache_salt=salt_words(fingerprint, request.cache_salt),
    )
