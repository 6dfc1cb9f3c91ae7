from __future__ import annotations

import pytest
from blink.v1 import inference_pb2
from hypothesis import given
from hypothesis import strategies as st

from services.dpu_gateway.errors import FieldError
from services.dpu_gateway.wire import lenient_parser

parse = lenient_parser(inference_pb2.GenerateRequest)


def broken(field: str) -> bytes:
    """A request whose ``field`` holds a lone surrogate, as only a hand-written client can send it."""
    mark = "~~~"
    chat = inference_pb2.ChatPrompt(
        messages=[
            inference_pb2.ChatMessage(role="user", content="fine"),
            inference_pb2.ChatMessage(role="user", content=mark),
        ]
    )
    message = {
        "text": inference_pb2.GenerateRequest(priority=2, text=mark),
        "chat.messages[1].content": inference_pb2.GenerateRequest(chat=chat),
        "stop.strings[1]": inference_pb2.GenerateRequest(
            sampling=inference_pb2.SamplingParams(temperature=1), stop=inference_pb2.StopConditions(strings=["a", mark])
        ),
    }[field]
    return message.SerializeToString().replace(mark.encode(), b"\xed\xa0\x80")


@pytest.mark.parametrize("field", ["text", "chat.messages[1].content", "stop.strings[1]"])
def test_invalid_utf8_is_reported_with_the_fields_path(field: str) -> None:
    error = parse(broken(field))
    assert isinstance(error, FieldError)
    assert (error.field, error.problem) == (field, "is not valid UTF-8")


def test_bytes_that_are_no_message_are_reported_as_such() -> None:
    error = parse(b"\x1a\xff")
    assert isinstance(error, FieldError)
    assert "not a valid blink.v1.GenerateRequest" in str(error)


def test_a_good_message_is_parsed() -> None:
    message = inference_pb2.GenerateRequest(text="hello")
    assert parse(message.SerializeToString()) == message


@given(st.binary(max_size=64))
def test_no_bytes_raise(data: bytes) -> None:
    assert isinstance(parse(data), inference_pb2.GenerateRequest | FieldError)
