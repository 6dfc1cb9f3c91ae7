from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from tokenizers import Tokenizer

from services.dpu_gateway.access.keys import new_key
from tests.dpu_gateway.harness import EOS, MODEL, Gateway, gateway, until
from tests.dpu_gateway.small_tokenizer import byte_level_tokenizer
from tests.dpu_gateway.test_generate import says
from tests.support.stand_in_engine import Behaviour
from tests.support.stand_in_lane import LOGPROB

TOKENIZER = byte_level_tokenizer()
IDS = TOKENIZER.encode("The quick brown fox").ids


def stub(system: Gateway, worker: int = 0) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(system.channel(worker))


def request(stream: bool = True, **sampling: Any) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        request_id="mine",
        tokenized=vllm.TokenizedInput(original_text="ignored", input_ids=IDS),
        sampling_params=vllm.SamplingParams(**sampling),
        stream=stream,
    )


async def responses(system: Gateway, message: vllm.GenerateRequest) -> list[vllm.GenerateResponse]:
    return [response async for response in stub(system).Generate(message)]


async def test_a_stream_is_parts_and_then_the_whole() -> None:
    async with gateway(Behaviour(tokens_per_second=500, cached_tokens=3)) as system:
        *parts, last = await responses(system, request(max_tokens=10))
    ids = [index for part in parts for index in part.chunk.token_ids]
    assert ids == (IDS * 10)[:10] == list(last.complete.output_ids)
    assert len(parts) > 1
    assert all(part.chunk.completion_tokens == len(part.chunk.token_ids) for part in parts)
    assert {part.chunk.prompt_tokens for part in parts} == {len(IDS)}
    assert {part.chunk.cached_tokens for part in parts} == {last.complete.cached_tokens} == {3}
    complete = last.complete
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", len(IDS), 10)


async def test_without_streaming_only_the_whole_comes_and_text_is_a_prompt_too() -> None:
    message = request(stream=False, max_tokens=4)
    message.text = "The quick brown fox"
    async with gateway() as system:
        (only,) = await responses(system, message)
    assert list(only.complete.output_ids) == IDS[:4]


async def test_what_stopped_it_is_named() -> None:
    behaviour = Behaviour(script=says("He said STOP HERE now", end=EOS))
    newline = TOKENIZER.encode("n").ids[-1]
    async with gateway(behaviour) as system:
        by_string = (await responses(system, request(stop=["STOP"])))[-1].complete
        assert (by_string.finish_reason, by_string.matched_stop_str) == ("stop", "STOP")
        assert TOKENIZER.decode(by_string.output_ids) == "He said STOP"
        by_end = (await responses(system, request()))[-1].complete
        assert (by_end.finish_reason, by_end.WhichOneof("matched_stop")) == ("stop", None)
    async with gateway(Behaviour(script=says("on"))) as system:
        by_token = (await responses(system, request(stop_token_ids=[newline])))[-1].complete
        assert (by_token.finish_reason, by_token.matched_token_id) == ("stop", newline)


async def test_logprobs_come_with_parts_and_whole() -> None:
    async with gateway() as system:
        *parts, last = await responses(system, request(max_tokens=5, logprobs=2))
    merged = vllm.OutputLogProbs()
    for part in parts:
        merged.MergeFrom(part.chunk.output_logprobs)
    assert merged == last.complete.output_logprobs
    assert list(merged.token_logprobs) == [LOGPROB] * 5
    assert [len(top.token_ids) for top in merged.top_logprobs] == [2] * 5


async def test_several_choices_carry_their_index_and_end_together_by_abort() -> None:
    async with gateway(Behaviour(tokens_per_second=20)) as system:
        call = asyncio.create_task(responses(system, request(stream=False, n=3, seed=7)))
        await until(lambda: int(system.engine.lanes[0].live.sum()) == 3)
        seeds = sorted(int(each["seed"]) for each in system.engine.lanes[0].descriptors)
        await stub(system).Abort(vllm.AbortRequest(request_ids=["mine", "never"]))
        answers = await call
    assert seeds == [7, 8, 9]
    assert sorted(answer.complete.index for answer in answers) == [0, 1, 2]
    assert {answer.complete.finish_reason for answer in answers} == {"abort"}


async def test_unset_sampling_is_the_default_and_set_sampling_reaches_the_engine() -> None:
    async with gateway() as system:
        await responses(system, request(max_tokens=1))
        await responses(
            system,
            request(
                max_tokens=1, temperature=0, top_p=0.5, top_k=3, min_p=0.25, repetition_penalty=1.5, ignore_eos=True
            ),
        )
        first, second = system.engine.lanes[0].descriptors
    assert (first["temperature"], first["top_p"], first["repetition_penalty"], first["flags"]) == (1, 1, 1, 0)
    assert (second["temperature"], second["top_p"], second["top_k"], second["min_p"]) == (0, 0.5, 3, 0.25)
    assert (second["repetition_penalty"], second["flags"]) == (1.5, 1)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"json_object": True}, "json_object is not supported"),
        ({"regex": "a"}, "regex is not supported"),
        ({"logit_bias": {1: 2.0}}, "logit_bias is not supported"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not supported"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"n": 129}, "n is 129, at most 128"),
        ({"top_p": 2}, "sampling.top_p is 2"),
        ({"max_tokens": 0}, "stop.max_tokens is 0"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(sampling: dict[str, Any], words: str) -> None:
    async with gateway() as system:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await responses(system, request(**sampling))
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in str(refusal.value.details())


async def test_the_model_the_server_and_its_load_are_described() -> None:
    async with gateway(Behaviour(tokens_per_second=20)) as system:
        info = await stub(system).GetModelInfo(vllm.GetModelInfoRequest())
        assert (info.served_model_name, info.max_context_length, info.vocab_size) == (MODEL, 2048, 640)
        assert list(info.eos_token_ids) == [TOKENIZER.token_to_id(EOS)]
        call = stub(system).Generate(request())
        await call.read()
        server = await stub(system).GetServerInfo(vllm.GetServerInfoRequest())
        assert (server.active_requests, server.is_paused, server.max_num_seqs) == (1, False, 8)
        (load,) = (await stub(system).GetLoads(vllm.GetLoadsRequest())).loads
        assert (load.num_running_reqs, load.num_total_reqs, load.token_usage) == (1, 1, 1 / 16)
        assert (await stub(system).HealthCheck(vllm.HealthCheckRequest())).healthy
        call.cancel()
        await system.kill_engine()
        await until(lambda: system.workers[0].link.session is None)
        health = await stub(system).HealthCheck(vllm.HealthCheckRequest())
        assert not health.healthy
        assert health.message


async def test_the_tokenizer_comes_as_files_with_their_fingerprint() -> None:
    async with gateway() as system:
        chunks = [chunk async for chunk in stub(system).GetTokenizer(common_pb2.GetTokenizerRequest())]
        again = [chunk async for chunk in stub(system).GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks == again
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    files = zipfile.ZipFile(io.BytesIO(data))
    assert Tokenizer.from_buffer(files.read("tokenizer.json")).encode("The quick brown fox").ids == IDS
    config = json.loads(files.read("tokenizer_config.json"))
    assert config["eos_token"] == EOS
    assert "im_start" in config["chat_template"]


async def test_keys_are_asked_for_here_too_and_what_is_not_served_is_unimplemented(tmp_path: Path) -> None:
    key, digest = new_key()
    (tmp_path / "keys.toml").write_text(f'[me]\nsha256 = "{digest}"\n')
    async with gateway(api_keys=tmp_path / "keys.toml") as system:
        for call in (
            stub(system).GetModelInfo(vllm.GetModelInfoRequest()),
            stub(system).GetServerInfo(vllm.GetServerInfoRequest()),
            stub(system).GetLoads(vllm.GetLoadsRequest()),
            stub(system).Abort(vllm.AbortRequest(request_ids=["x"])),
            stub(system).FlushCache(common_pb2.FlushCacheRequest()),
        ):
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError, match="API key"):
            await responses(system, request())
        metadata = (("authorization", f"Bearer {key}"),)
        calls = stub(system).Generate(request(max_tokens=1), metadata=metadata)
        assert [response.WhichOneof("response") async for response in calls][-1] == "complete"
        embed = stub(system).Embed(vllm.EmbedRequest(), metadata=metadata)
        assert await embed.code() is grpc.StatusCode.UNIMPLEMENTED
