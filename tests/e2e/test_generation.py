"""A real model answers real calls."""

from __future__ import annotations

import grpc
import pytest
from blink.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

from tests.e2e.conftest import Launch
from tests.e2e.product import LIMIT, Stream, request

MODEL = "smollm2-135m-instruct"
PROMPT = "The capital of France is"

pytestmark = pytest.mark.model


def test_a_model_answers_with_sense_and_the_same_every_time(launch: Launch) -> None:
    product = launch("--workers", "2", "--sample", "Say hello.", model=MODEL)
    with product.channel() as first, product.channel() as second:
        alone = Stream(first, request(PROMPT, 24)).join()
        assert "Paris" in alone.text
        together = [Stream(channel, request(PROMPT, 24)) for channel in (first, second) for _ in range(3)]
        others = [Stream(second, request(f"{number} bottles of", 24)) for number in range(3)]
        for stream in (*together, *others):
            assert stream.join().reason == "LENGTH"
        assert {tuple(stream.ids) for stream in together} == {tuple(alone.ids)}
        assert {stream.text for stream in together} == {alone.text}
        info = control_pb2_grpc.ControlStub(first).GetModelInfo(control_pb2.GetModelInfoRequest(), timeout=LIMIT)
        assert (info.name, info.vocabulary_size, info.max_context_tokens) == (MODEL, 49_152, 8_192)
        assert info.has_chat_template
    done = product.blink("generate", PROMPT, "--raw", "--temperature", "0", "--max-tokens", "24", "--ignore-eos")
    assert done.returncode == 0
    assert done.stdout.rstrip("\n") == alone.text.rstrip("\n")
    chat = product.blink("generate", "Which city is the capital of France?", "--temperature", "0")
    assert "Paris" in chat.stdout
    status = product.blink("status")
    assert status.returncode == 0
    assert "READY" in status.stdout
    assert product.stop() == 0
    assert product.left_behind() == []
    assert "> Say hello." in product.output
    assert len(" ".join(product.output)) > len("> Say hello.") + 5


def test_a_seed_repeats_a_sampled_generation_and_an_abort_ends_one(launch: Launch) -> None:
    product = launch(model=MODEL)
    with product.channel() as channel:

        def sampled(seed: int) -> list[int]:
            message = request(PROMPT, 16)
            message.sampling.temperature = 1.0
            message.sampling.seed = seed
            return Stream(channel, message).join().ids

        assert sampled(1) == sampled(1)
        assert sampled(1) != sampled(2)
        endless = Stream(channel, request(PROMPT, 4000, request_id="mine"))
        endless.wait_for_tokens()
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert stub.Abort(inference_pb2.AbortRequest(request_id="mine"), timeout=LIMIT).found
        assert endless.join().reason == "CANCELLED"
        assert not stub.Abort(inference_pb2.AbortRequest(request_id="mine"), timeout=LIMIT).found


def test_bad_requests_are_refused_naming_the_field_and_harm_nobody(launch: Launch) -> None:
    product = launch(model=MODEL)
    with product.channel() as channel:
        bystander = Stream(channel, request(PROMPT, 200))
        bystander.wait_for_tokens()
        bad = {
            "temperature": request("x", 1),
            "max_tokens": request("x", 100_000),
            "text": request("", 1),
            "token_ids": inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1 << 31])),
        }
        bad["temperature"].sampling.temperature = float("nan")
        for field, message in bad.items():
            stream = Stream(channel, message).join()
            assert stream.code is grpc.StatusCode.INVALID_ARGUMENT, field
            assert field in stream.details
        assert bystander.join().reason == "LENGTH"
