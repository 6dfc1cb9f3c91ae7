"""Whatever comes by HTTP or gRPC is answered, never with a fault of the gateway's, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import grpc
import httpx2
import pytest
from blink.v1 import control_pb2
from blink.v1 import inference_pb2 as pb
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from services.dpu_gateway.http.schema import ChatCompletionBody, CompletionBody
from tests.dpu_gateway.fuzzing import fuzzing, open_files
from tests.dpu_gateway.harness import MODEL, Gateway, gateway, until
from tests.dpu_gateway.http.clients import http_client
from tests.dpu_gateway.messages import messages
from tests.support.stand_in_engine import Behaviour

T = TypeVar("T")
TIMES = fuzzing(150)
SLOTS = 8
# What a request may rightly end with here; anything else is a fault of ours.
ANSWERS = {200, 400, 404, 413, 415, 429}
CODES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
names = st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=6
)


class System:
    """One gateway for all examples of a test, driven from the test's own thread."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.run: Callable[[Any], Any] = runner.run
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        self.gateway: Gateway = await self._stack.enter_async_context(
            # The loop stands still while hypothesis thinks: neither heartbeat nor lease may run out then.
            gateway(Behaviour(burst=64), heartbeat_timeout=60, lease_timeout_ms=60_000)
        )
        self._files = open_files()
        self.http: httpx2.AsyncClient = await self._stack.enter_async_context(http_client(self.gateway))

    async def stop(self) -> None:
        """Nothing of all that was sent may be left."""
        await until(lambda: self.gateway.workers[0].generations.open_streams == 0)
        await until(lambda: self.gateway.session.free_slots == SLOTS)
        assert not self.gateway.engine.lanes[0].live.any()
        assert self.gateway.session.free_arena_bytes == self.gateway.session.geometry.arena_bytes
        await self.http.aclose()
        await until(lambda: open_files() <= self._files + 2)  # gRPC's connection stays, one socket at each end
        await self._stack.aclose()

    async def within(self, answer: Awaitable[T]) -> T:
        async with asyncio.timeout(30):
            return await answer


@pytest.fixture
def system() -> Iterator[System]:
    with asyncio.Runner() as runner:
        system = System(runner)
        runner.run(system.start())
        yield system
        runner.run(system.stop())


def bodies(model: type[CompletionBody] | type[ChatCompletionBody], sensible: dict[str, Any]) -> Any:
    """Requests that are right but for a few fields, which hold anything; and some that are anything at all."""
    fields = st.sampled_from([*model.model_fields, *model.unsupported, "nonsense"])
    changed = st.dictionaries(fields, values, max_size=3).map(lambda changes: {**sensible, **changes})
    return (changed | values).map(lambda body: json.dumps(body).encode()) | st.binary()


def check(system: System, path: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = system.run(system.within(system.http.post(path, content=body, headers=headers)))
    assert response.status_code in ANSWERS, (response.status_code, response.text, body)
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_completions_answer_any_body(system: System) -> None:
    @TIMES
    @given(bodies(CompletionBody, {"model": MODEL, "prompt": "abc", "max_tokens": 3}))
    def answered(body: bytes) -> None:
        check(system, "/v1/completions", body)

    answered()


def test_chat_completions_answer_any_body(system: System) -> None:
    messages = [{"role": "user", "content": "hi"}]

    @TIMES
    @given(bodies(ChatCompletionBody, {"model": MODEL, "messages": messages, "max_tokens": 3}))
    def answered(body: bytes) -> None:
        check(system, "/v1/chat/completions", body)

    answered()


@pytest.mark.parametrize("method", ["/blink.v1.Inference/Generate", "/vllm.grpc.engine.VllmEngine/Generate"])
def test_generate_answers_any_bytes(system: System, method: str) -> None:
    raw: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = system.gateway.channel().unary_stream(method)

    async def code(data: bytes) -> grpc.StatusCode:
        call = raw(data)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    message = vllm.GenerateRequest if "vllm" in method else pb.GenerateRequest
    start = message(text="abc").SerializeToString()  # a valid beginning gets further than noise

    @TIMES
    @given(st.binary(max_size=60) | st.binary(max_size=12).map(lambda tail: start + tail))
    def answered(data: bytes) -> None:
        assert system.run(system.within(code(data))) in CODES

    answered()


async def status(answer: Any) -> grpc.StatusCode:
    """With which a call ends, of one answer or of a stream."""
    try:
        if hasattr(answer, "__aiter__"):
            async for _ in answer:
                pass
        else:
            await answer
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def shortened(request: Any) -> Any:
    """What would take long and show nothing more does not: a message may ask for all of the context."""
    if isinstance(request, pb.GenerateRequest):
        request.stop.max_tokens = min(request.stop.max_tokens, 9) if request.stop.HasField("max_tokens") else 9
    elif isinstance(request, vllm.GenerateRequest):
        parameters = request.sampling_params
        parameters.max_tokens = min(parameters.max_tokens, 9) if parameters.HasField("max_tokens") else 9
    return request


@pytest.mark.parametrize(
    ("service", "method", "kind"),
    [
        ("blink.v1.Inference", "Generate", pb.GenerateRequest),
        ("blink.v1.Inference", "Abort", pb.AbortRequest),
        ("blink.v1.Control", "GetLoad", control_pb2.GetLoadRequest),
        ("blink.v1.Control", "GetModelInfo", control_pb2.GetModelInfoRequest),
        ("vllm.grpc.engine.VllmEngine", "Generate", vllm.GenerateRequest),
        ("vllm.grpc.engine.VllmEngine", "Abort", vllm.AbortRequest),
    ],
)
def test_every_message_of_the_right_type_is_answered(
    system: System, service: str, method: str, kind: type[Message]
) -> None:
    """Any combination of fields with any values, a sensible prompt among them as often as not."""
    channel = system.gateway.channel()
    make = channel.unary_stream if method == "Generate" else channel.unary_unary
    call: Any = make(f"/{service}/{method}", request_serializer=kind.SerializeToString)
    codes: Counter[grpc.StatusCode] = Counter()

    @fuzzing(300)
    @given(messages(kind), st.booleans())
    def answered(request: Message, sensible: bool) -> None:
        if sensible and method == "Generate":
            request.text = "abc"  # type: ignore[attr-defined]
        code = system.run(system.within(status(call(shortened(request)))))
        assert code in CODES, request
        codes[code] += 1

    answered()
    assert codes[grpc.StatusCode.OK] > 0  # not all of it stopped at the door
