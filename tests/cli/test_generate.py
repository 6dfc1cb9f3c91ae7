"""``blink generate`` against a real gateway over the stand-in engine."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from typing import Any

import grpc
import pytest
from blink.v1 import inference_pb2

from services.cli.errors import CommandError
from services.cli.generate import Options, build_request
from tests.cli.run_blink import BLINK, assert_one_line_failure, blink
from tests.dpu_gateway.harness import Gateway, gateway, until
from tests.support.stand_in_engine import Behaviour


def address(system: Gateway) -> str:
    return f"unix:{system.directory / 'api-0.sock'}"


async def generate(system: Gateway, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(blink, "generate", *arguments, "--address", address(system))


async def test_a_raw_prompt_is_sent_as_it_stands_and_the_text_comes_back() -> None:
    async with gateway() as system:
        done = await generate(system, "abc", "--raw", "--max-tokens", "6")
    assert (done.returncode, done.stdout) == (0, "abcabc\n")
    assert done.stderr == "blink: cut short: --max-tokens or the context's end was reached\n"


async def test_it_is_a_chat_when_the_model_has_a_template() -> None:
    async with gateway() as system:
        done = await generate(system, "hi", "--system", "be brief", "--json", "--max-tokens", "1")
        plain = await generate(system, "hi", "--raw", "--json", "--max-tokens", "1")
    accepted = [json.loads(each.stdout.splitlines()[0])["accepted"] for each in (done, plain)]
    assert accepted[0]["prompt_tokens"] > accepted[1]["prompt_tokens"]


async def test_the_prompt_can_come_from_standard_input() -> None:
    async with gateway() as system:
        command = [*BLINK, "generate", "-", "--raw", "--max-tokens", "3", "--address", address(system)]
        done = await asyncio.to_thread(
            subprocess.run, command, input="xyz", capture_output=True, text=True, check=False, timeout=60
        )
    assert done.stdout == "xyz\n"


async def test_an_interrupt_aborts_the_generation_in_the_engine() -> None:
    made = 0.0  # the engine's clock, at one token a second
    async with gateway(Behaviour(tokens_per_second=1, clock=lambda: made)) as system:
        command = [*BLINK, "generate", "abc", "--raw", "--address", address(system)]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        await until(lambda: bool(system.engine.lanes[0].live.any()))
        made = 3
        assert await process.stdout.readexactly(3) == b"abc"
        process.send_signal(signal.SIGINT)
        _, stderr = await process.communicate()
        assert (process.returncode, stderr) == (130, b"blink: aborted after 3 tokens\n")
        await until(lambda: not system.engine.lanes[0].live.any() and system.workers[0].generations.open_streams == 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1"], ["INVALID_ARGUMENT", "temperature", "-1"]),
        (["--max-tokens", "100000"], ["INVALID_ARGUMENT", "max_tokens", "100000"]),
        (["--model", "other"], ["NOT_FOUND", "other"]),
        (["--top-k", "-1"], ["--top-k", "0"]),
        (["--raw", "--system", "x"], ["--system"]),
    ],
)
async def test_a_refusal_is_one_clear_line(arguments: list[str], words: list[str]) -> None:
    async with gateway() as system:
        assert_one_line_failure(await generate(system, "abc", *arguments), *words)


async def test_an_engine_that_dies_in_mid_stream_is_one_clear_line() -> None:
    async with gateway(Behaviour(tokens_per_second=50), heartbeat_timeout=1.0) as system:
        running = asyncio.create_task(generate(system, "abc", "--raw"))
        await until(lambda: bool(system.engine.lanes[0].live.any()))
        await system.kill_engine()
        done = await running
        assert_one_line_failure(done, "UNAVAILABLE")
        assert done.stdout == "" or done.stdout.endswith("\n")  # the error begins a line of its own


async def test_a_gateway_that_dies_in_mid_stream_is_one_clear_line() -> None:
    server = grpc.aio.server()

    async def one_token(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.write(inference_pb2.GenerateResponse(chunk=inference_pb2.TokenChunk(text="a", token_ids=[1])))
        await asyncio.Event().wait()

    method = grpc.unary_stream_rpc_method_handler(
        one_token, inference_pb2.GenerateRequest.FromString, inference_pb2.GenerateResponse.SerializeToString
    )
    handler = grpc.method_handlers_generic_handler("blink.v1.Inference", {"Generate": method})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    command = [*BLINK, "generate", "x", "--raw", "--address", f"127.0.0.1:{port}"]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readexactly(1)
    await server.stop(0)
    rest, stderr = await process.communicate()
    assert (process.returncode, rest) == (1, b"\n")
    assert stderr.startswith(f"blink: the gateway at 127.0.0.1:{port} broke the connection".encode())
    assert stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a\udcffb"], ["prompt", "UTF-8"]),
        (["x", "--stop", "\udcff"], ["--stop", "UTF-8"]),
        (["x", "--system", "\udcff"], ["--system"]),
        (["x", "--model", "\udcff"], ["--model", "UTF-8"]),
        (["x", "--request-id", "\udcff"], ["--request-id", "UTF-8"]),
        (["x", "--time-limit", "inf"], ["--time-limit"]),
        (["x", "--time-limit", "nan"], ["--time-limit"]),
        (["x", "--time-limit", "1e300"], ["--time-limit"]),
        (["x", "--priority", "99999999999"], ["--priority"]),
        (["x", "--max-tokens", "99999999999"], ["--max-tokens"]),
        (["x", "--seed", "-1"], ["--seed"]),
    ],
)
def test_an_option_that_no_message_can_hold_is_one_clear_line(arguments: list[str], words: list[str]) -> None:
    assert_one_line_failure(blink("generate", "--raw", *arguments, "--address", "127.0.0.1:1"), *words)


def test_standard_input_that_is_no_text_is_one_clear_line() -> None:
    command = [*BLINK, "generate", "-", "--raw", "--address", "127.0.0.1:1"]
    done = subprocess.run(command, input=b"ab\xff", capture_output=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.decode() == "blink: standard input is not valid UTF-8: byte 2 is 0xFF\n"


def test_no_gateway_is_one_clear_line() -> None:
    assert_one_line_failure(blink("generate", "x", "--address", "127.0.0.1:1"), "127.0.0.1:1", "services.cli up")


def test_every_option_reaches_its_field_and_what_is_unset_stays_unset() -> None:
    options = Options(
        "p", "a", model="m", request_id="r", temperature=0.0, top_k=1, top_p=0.5, min_p=0.25, repetition_penalty=2.0,
        presence_penalty=1.0, frequency_penalty=-1.0, seed=0, max_tokens=3, min_tokens=0, stop=["x"],
        stop_token_id=[7], ignore_eos=True, logprobs=0, priority=-4, time_limit=1.5,
    )  # fmt: skip
    request = build_request(options, "p", chat=True)
    assert (request.model, request.request_id, request.chat.messages[0].content) == ("m", "r", "p")
    assert len(request.sampling.ListFields()) == 8
    assert len(request.stop.ListFields()) == 5
    assert request.sampling.HasField("temperature")
    assert request.HasField("logprobs")
    assert (request.priority, request.time_limit.ToMilliseconds()) == (-4, 1500)
    bare = build_request(Options("p", "a"), "p", chat=False)
    assert bare.text == "p"
    assert [field.name for field, _ in bare.ListFields()] == ["text"]
    with pytest.raises(CommandError, match="--system"):
        build_request(Options("p", "a", system="s"), "p", chat=False)
