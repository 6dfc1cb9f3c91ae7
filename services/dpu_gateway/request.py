"""Validates a GenerateRequest: every rule of inference.proto; failures name the field, its value and the limit."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from blink.v1 import inference_pb2

from services.dpu_gateway.errors import FieldError, ModelNotFoundError
from services.ring.schema import (
    MAX_ADDITIVE_PENALTY,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKENS,
    MAX_TEMPERATURE,
    MIN_PRIORITY,
)

MAX_REQUEST_ID_CHARS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_CACHE_SALT_CHARS = 256
MAX_U32 = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class Limits:
    """What the served model and the ring allow."""

    model: str
    vocabulary_size: int
    max_context_tokens: int  # prompt and generated tokens together
    max_top_logprobs: int


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[dict[str, str], ...]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Request:
    """A valid request, all defaults filled in, its prompt not tokenized yet."""

    request_id: str
    prompt: TextPrompt | ChatPrompt | TokenPrompt
    sampling: Sampling
    seed: int
    max_tokens: int | None  # None: as many as the context allows
    min_tokens: int
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None  # None: not wanted; else how many alternatives
    priority: int
    time_limit_ms: int  # 0: none
    cache_salt: str = ""
    no_prefix_cache: bool = False


def parse_request(message: inference_pb2.GenerateRequest, limits: Limits) -> Request:
    """Raises FieldError or ModelNotFoundError."""
    if message.model and message.model != limits.model:
        raise ModelNotFoundError(message.model, limits.model)
    if len(message.request_id) > MAX_REQUEST_ID_CHARS:
        raise FieldError("request_id", f"has {len(message.request_id)} characters, at most {MAX_REQUEST_ID_CHARS}")
    if len(message.cache_salt) > MAX_CACHE_SALT_CHARS:
        raise FieldError("cache_salt", f"has {len(message.cache_salt)} characters, at most {MAX_CACHE_SALT_CHARS}")
    stop = message.stop
    max_tokens = stop.max_tokens if stop.HasField("max_tokens") else None
    if max_tokens is not None:
        _check_range("stop.max_tokens", max_tokens, 1, limits.max_context_tokens - 1)
    _check_range("stop.min_tokens", stop.min_tokens, 0, limits.max_context_tokens - 1)
    if max_tokens is not None and stop.min_tokens > max_tokens:
        raise FieldError("stop.min_tokens", f"is {stop.min_tokens}, more than stop.max_tokens, which is {max_tokens}")
    logprobs = message.logprobs if message.HasField("logprobs") else None
    if logprobs is not None:
        _check_range("logprobs", logprobs, 0, limits.max_top_logprobs)
    _check_range("priority", message.priority, MIN_PRIORITY, MAX_PRIORITY)
    sampling = message.sampling
    return Request(
        request_id=message.request_id or secrets.token_hex(16),
        prompt=_parse_prompt(message, limits),
        sampling=_parse_sampling(sampling),
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        max_tokens=max_tokens,
        min_tokens=stop.min_tokens,
        stop_strings=_parse_stop_strings(stop.strings),
        stop_token_ids=_parse_stop_token_ids(stop.token_ids, limits),
        ignore_eos=stop.ignore_eos,
        logprobs=logprobs,
        priority=message.priority,
        time_limit_ms=_parse_time_limit(message),
        cache_salt=message.cache_salt,
        no_prefix_cache=message.no_prefix_cache,
    )


def token_budget(request: Request, prompt_tokens: int, limits: Limits) -> int:
    """How many tokens may be generated after a prompt of ``prompt_tokens``. Raises FieldError if that is too few."""
    field = {TextPrompt: "text", ChatPrompt: "chat", TokenPrompt: "token_ids.ids"}[type(request.prompt)]
    room = limits.max_context_tokens - prompt_tokens
    if room < 1:
        raise FieldError(
            field, f"has {prompt_tokens} tokens, at most {limits.max_context_tokens - 1} fit before the first new one"
        )
    if request.max_tokens is not None and request.max_tokens > room:
        raise FieldError(
            "stop.max_tokens",
            f"is {request.max_tokens}, at most {room}: the prompt has {prompt_tokens} tokens "
            f"and the context {limits.max_context_tokens}",
        )
    if request.min_tokens > room:
        raise FieldError(
            "stop.min_tokens",
            f"is {request.min_tokens}, at most {room}: the prompt has {prompt_tokens} tokens "
            f"and the context {limits.max_context_tokens}",
        )
    return room if request.max_tokens is None else request.max_tokens


def _parse_prompt(message: inference_pb2.GenerateRequest, limits: Limits) -> TextPrompt | ChatPrompt | TokenPrompt:
    match message.WhichOneof("prompt"):
        case "text":
            if not message.text:
                raise FieldError("text", "is empty")
            return TextPrompt(message.text)
        case "chat":
            if not message.chat.messages:
                raise FieldError("chat.messages", "is empty")
            for index, turn in enumerate(message.chat.messages):
                if not turn.role:
                    raise FieldError(f"chat.messages[{index}].role", "is empty")
            if not message.chat.messages[-1].content:  # earlier ones may be: an assistant's turn that was cut off
                raise FieldError(f"chat.messages[{len(message.chat.messages) - 1}].content", "is empty")
            turns = ({"role": turn.role, "content": turn.content} for turn in message.chat.messages)
            return ChatPrompt(tuple(turns))
        case "token_ids":
            ids = list(message.token_ids.ids)
            if not ids:
                raise FieldError("token_ids.ids", "is empty")
            if max(ids) >= limits.vocabulary_size:
                index = int(np.argmax(np.asarray(ids) >= limits.vocabulary_size))
                raise _unknown_token(f"token_ids.ids[{index}]", ids[index], limits)
            return TokenPrompt(ids)
        case _:
            raise FieldError("prompt", "is not set: send one of text, chat or token_ids")


def _parse_sampling(sampling: inference_pb2.SamplingParams) -> Sampling:
    def value(name: str, default: float, low: float, high: float, low_open: bool = False) -> float:
        if not sampling.HasField(name):
            return default
        given = float(getattr(sampling, name))
        if not (math.isfinite(given) and low <= given <= high and not (low_open and given == low)):
            raise FieldError(
                f"sampling.{name}", f"is {given:g}, must be in {'(' if low_open else '['}{low:g}, {high:g}]"
            )
        return given

    return Sampling(
        temperature=value("temperature", 1, 0, MAX_TEMPERATURE),
        top_k=sampling.top_k,
        top_p=value("top_p", 1, 0, 1, low_open=True),
        min_p=value("min_p", 0, 0, 1),
        repetition_penalty=value("repetition_penalty", 1, 0, MAX_REPETITION_PENALTY, low_open=True),
        presence_penalty=value("presence_penalty", 0, -MAX_ADDITIVE_PENALTY, MAX_ADDITIVE_PENALTY),
        frequency_penalty=value("frequency_penalty", 0, -MAX_ADDITIVE_PENALTY, MAX_ADDITIVE_PENALTY),
    )


def _parse_stop_strings(strings: Sequence[str]) -> tuple[str, ...]:
    if len(strings) > MAX_STOP_STRINGS:
        raise FieldError("stop.strings", f"has {len(strings)} strings, at most {MAX_STOP_STRINGS}")
    for index, string in enumerate(strings):
        if not 1 <= len(string) <= MAX_STOP_STRING_CHARS:
            raise FieldError(
                f"stop.strings[{index}]", f"has {len(string)} characters, must have 1 to {MAX_STOP_STRING_CHARS}"
            )
    return tuple(strings)


def _parse_stop_token_ids(ids: Sequence[int], limits: Limits) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_TOKENS:
        raise FieldError("stop.token_ids", f"has {len(ids)} ids, at most {MAX_STOP_TOKENS}")
    for index, token in enumerate(ids):
        if token >= limits.vocabulary_size:
            raise _unknown_token(f"stop.token_ids[{index}]", token, limits)
    return tuple(ids)


def _parse_time_limit(message: inference_pb2.GenerateRequest) -> int:
    """Whole milliseconds, rounded up; 0 when there is no limit."""
    if not message.HasField("time_limit"):
        return 0
    limit = message.time_limit
    milliseconds = limit.seconds * 1000 + -(-limit.nanos // 1_000_000)
    if not 0 < milliseconds <= MAX_U32:
        raise FieldError("time_limit", f"is {milliseconds} ms, must be 1 to {MAX_U32}")
    return milliseconds


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise FieldError(field, f"is {value}, must be {low} to {high}")


def _unknown_token(field: str, token: int, limits: Limits) -> FieldError:
    return FieldError(field, f"is {token}, must be below {limits.vocabulary_size}, the vocabulary's size")
