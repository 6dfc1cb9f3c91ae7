from __future__ import annotations

import math
from collections.abc import Callable

import grpc
import pytest
from blink.v1 import inference_pb2
from google.rpc import error_details_pb2  # type: ignore[import-untyped]

from services.dpu_gateway.errors import FieldError, ModelNotFoundError
from services.dpu_gateway.request import ChatPrompt, Limits, TokenPrompt, parse_request, token_budget

LIMITS = Limits(model="small", vocabulary_size=1000, max_context_tokens=64, max_top_logprobs=20)
Message = inference_pb2.GenerateRequest
Change = Callable[[Message], object]


def message(change: Change = lambda _: None) -> Message:
    built = Message(text="hello")
    change(built)
    return built


def test_unset_fields_get_the_documented_defaults_not_zero() -> None:
    request = parse_request(message(), LIMITS)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1, 0, 1, 0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1, 0, 0)
    assert (request.max_tokens, request.min_tokens, request.logprobs, request.priority) == (None, 0, None, 0)
    assert (request.stop_strings, request.stop_token_ids, request.ignore_eos, request.time_limit_ms) == (
        (),
        (),
        False,
        0,
    )


def test_zero_that_was_set_is_kept() -> None:
    def change(m: Message) -> None:
        m.sampling.temperature = 0
        m.sampling.seed = 0
        m.logprobs = 0

    request = parse_request(message(change), LIMITS)
    assert (request.sampling.temperature, request.seed, request.logprobs) == (0, 0, 0)


def test_an_id_and_a_seed_are_drawn_when_unset() -> None:
    first, second = (parse_request(message(), LIMITS) for _ in range(2))
    assert first.request_id != second.request_id
    assert first.seed != second.seed


def test_prompts_of_each_kind() -> None:
    chat = Message(chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="hi")]))
    assert parse_request(chat, LIMITS).prompt == ChatPrompt(({"role": "user", "content": "hi"},))
    ids = Message(token_ids=inference_pb2.TokenIds(ids=[0, 999]))
    assert parse_request(ids, LIMITS).prompt == TokenPrompt([0, 999])


def test_a_time_limit_is_rounded_up_to_milliseconds() -> None:
    assert parse_request(message(lambda m: m.time_limit.FromNanoseconds(1)), LIMITS).time_limit_ms == 1
    assert parse_request(message(lambda m: m.time_limit.FromMilliseconds(1500)), LIMITS).time_limit_ms == 1500


def sampling(name: str, value: float) -> Change:
    return lambda m: setattr(m.sampling, name, value)


def stop(name: str, value: int) -> Change:
    return lambda m: setattr(m.stop, name, value)


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        (lambda m: m.ClearField("text"), "prompt", "is not set"),
        (lambda m: setattr(m, "text", ""), "text", "is empty"),
        (lambda m: m.chat.SetInParent(), "chat.messages", "is empty"),
        (lambda m: m.chat.messages.add(content="x"), "chat.messages[0].role", "is empty"),
        (lambda m: m.token_ids.SetInParent(), "token_ids.ids", "is empty"),
        (lambda m: m.token_ids.ids.extend([3, 1000]), "token_ids.ids[1]", "is 1000, must be below 1000"),
        (lambda m: setattr(m, "request_id", "x" * 129), "request_id", "has 129 characters, at most 128"),
        (lambda m: setattr(m, "cache_salt", "x" * 257), "cache_salt", "has 257 characters, at most 256"),
        (sampling("temperature", math.nan), "sampling.temperature", "is nan, must be in [0, 100]"),
        (sampling("temperature", -1), "sampling.temperature", "is -1, must be in [0, 100]"),
        (sampling("temperature", math.inf), "sampling.temperature", "is inf"),
        (sampling("top_p", 0), "sampling.top_p", "is 0, must be in (0, 1]"),
        (sampling("top_p", 2), "sampling.top_p", "is 2, must be in (0, 1]"),
        (sampling("min_p", 1.5), "sampling.min_p", "is 1.5, must be in [0, 1]"),
        (sampling("repetition_penalty", 0), "sampling.repetition_penalty", "is 0, must be in (0, 10]"),
        (sampling("presence_penalty", 3), "sampling.presence_penalty", "is 3, must be in [-2, 2]"),
        (sampling("frequency_penalty", -3), "sampling.frequency_penalty", "is -3, must be in [-2, 2]"),
        (stop("max_tokens", 0), "stop.max_tokens", "is 0, must be 1 to 63"),
        (stop("max_tokens", 64), "stop.max_tokens", "is 64, must be 1 to 63"),
        (stop("min_tokens", 64), "stop.min_tokens", "is 64, must be 0 to 63"),
        (lambda m: m.stop.strings.extend(["a"] * 17), "stop.strings", "has 17 strings, at most 16"),
        (lambda m: m.stop.strings.extend(["a", ""]), "stop.strings[1]", "has 0 characters, must have 1 to 256"),
        (lambda m: m.stop.strings.append("a" * 257), "stop.strings[0]", "has 257 characters"),
        (lambda m: m.stop.token_ids.extend([1] * 17), "stop.token_ids", "has 17 ids, at most 16"),
        (lambda m: m.stop.token_ids.append(1000), "stop.token_ids[0]", "is 1000, must be below 1000"),
        (lambda m: setattr(m, "logprobs", 21), "logprobs", "is 21, must be 0 to 20"),
        (lambda m: setattr(m, "priority", 5), "priority", "is 5, must be -4 to 4"),
        (lambda m: setattr(m, "priority", -5), "priority", "is -5, must be -4 to 4"),
        (lambda m: m.time_limit.SetInParent(), "time_limit", "is 0 ms"),
        (lambda m: m.time_limit.FromSeconds(-1), "time_limit", "is -1000 ms"),
        (lambda m: m.time_limit.FromSeconds(5_000_000), "time_limit", "must be 1 to 4294967295"),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_the_limit(change: Change, field: str, problem: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_request(message(change), LIMITS)
    error = caught.value
    assert error.field == field
    assert problem in str(error)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    details = error_details_pb2.BadRequest()
    assert error.status().details[0].Unpack(details)
    assert [violation.field for violation in details.field_violations] == [field]


def test_fields_that_contradict_each_other_are_refused() -> None:
    def change(m: Message) -> None:
        m.stop.max_tokens = 3
        m.stop.min_tokens = 4

    with pytest.raises(FieldError, match=r"min_tokens is 4, more than stop\.max_tokens, which is 3"):
        parse_request(message(change), LIMITS)


def test_another_model_is_not_found() -> None:
    assert parse_request(message(lambda m: setattr(m, "model", "small")), LIMITS)
    with pytest.raises(ModelNotFoundError, match="'large' is not served here; 'small' is"):
        parse_request(message(lambda m: setattr(m, "model", "large")), LIMITS)


def test_the_token_budget_is_what_the_context_leaves() -> None:
    free = parse_request(message(), LIMITS)
    assert token_budget(free, 1, LIMITS) == 63
    assert token_budget(free, 63, LIMITS) == 1
    with pytest.raises(FieldError, match="text has 64 tokens, at most 63"):
        token_budget(free, 64, LIMITS)
    asked = parse_request(message(stop("max_tokens", 10)), LIMITS)
    assert token_budget(asked, 54, LIMITS) == 10
    with pytest.raises(FieldError, match="max_tokens is 10, at most 9: the prompt has 55 tokens and the context 64"):
        token_budget(asked, 55, LIMITS)
    least = parse_request(message(stop("min_tokens", 10)), LIMITS)
    with pytest.raises(FieldError, match="min_tokens is 10, at most 9"):
        token_budget(least, 55, LIMITS)
