"""Routes of the HTTP API."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.dpu_gateway.access.callers import Caller
from services.dpu_gateway.detokenizer import Detokenizer
from services.dpu_gateway.errors import GatewayError, UnavailableError
from services.dpu_gateway.generation import Generations
from services.dpu_gateway.http.answer import Answer
from services.dpu_gateway.http.errors import HttpError, from_gateway, rate_headers
from services.dpu_gateway.http.exchange import read_json_body, run_while_connected
from services.dpu_gateway.http.formats import ChatFormat, CompletionFormat
from services.dpu_gateway.http.openapi import openapi_json
from services.dpu_gateway.http.schema import ChatCompletionBody, CompletionBody, GenerationBody
from services.dpu_gateway.http.translate import chat_messages, completion_messages
from services.dpu_gateway.metrics.exposition import Exposition
from services.dpu_gateway.model import Model
from services.dpu_gateway.tracing import TRACEPARENT, TRACESTATE, Trace

REQUEST_ID = re.compile(r"[!-~]{1,100}")  # leaves room for a choice's number
Handler = Callable[[Headers, Receive, Send], Awaitable[None]]


class HttpApi:
    """``retry_after`` in seconds is what refused callers are told to wait; ``max_body_bytes`` bounds a request."""

    def __init__(
        self, generations: Generations, exposition: Exposition, *, retry_after: float, max_body_bytes: int
    ) -> None:
        self._generations = generations
        self._exposition = exposition
        self._retry_after = retry_after
        self._max_body_bytes = max_body_bytes

    def app(self) -> Starlette:
        """The whole API."""
        return _app(
            Route("/v1/completions", _Endpoint(self._complete), methods=["POST"]),
            Route("/v1/chat/completions", _Endpoint(self._chat), methods=["POST"]),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._show_model),
            *self._probe_routes(),
            Route("/metrics", self._metrics),
            Route("/openapi.json", self._describe_api),
        )

    def probes(self) -> Starlette:
        """What may be asked by whoever watches this one worker."""
        return _app(*self._probe_routes())

    def _probe_routes(self) -> tuple[Route, Route]:
        return Route("/health", self._health), Route("/ready", self._ready)

    async def _complete(self, headers: Headers, receive: Receive, send: Send) -> None:
        caller = self._identify(headers)
        body = CompletionBody.read(await read_json_body(headers, receive, self._max_body_bytes))
        session = self._generations.require_session()
        model = session.model
        request_id = _request_id(headers, "cmpl-")
        messages = completion_messages(body, request_id)
        _require_slots(len(messages), session.geometry.slots_per_lane)
        echoes = [_prompt_text(message.text, message.token_ids.ids, model) for message in messages] if body.echo else []
        answer = Answer(
            self._generations,
            messages,
            CompletionFormat(model.decode_table, echoes),
            caller=caller,
            trace=Trace(headers.get(TRACEPARENT, ""), headers.get(TRACESTATE, "")),
            request_id=request_id,
            model=model.card.name,
            repeats=body.n or 1,
        )
        await _give(answer, body, caller, receive, send)

    async def _chat(self, headers: Headers, receive: Receive, send: Send) -> None:
        caller = self._identify(headers)
        body = ChatCompletionBody.read(await read_json_body(headers, receive, self._max_body_bytes))
        session = self._generations.require_session()
        model = session.model
        request_id = _request_id(headers, "chatcmpl-")
        messages = chat_messages(body, request_id)
        _require_slots(len(messages), session.geometry.slots_per_lane)
        answer = Answer(
            self._generations,
            messages,
            ChatFormat(model.decode_table),
            caller=caller,
            trace=Trace(headers.get(TRACEPARENT, ""), headers.get(TRACESTATE, "")),
            request_id=request_id,
            model=model.card.name,
            repeats=len(messages),
        )
        await _give(answer, body, caller, receive, send)

    async def _list_models(self, request: Request) -> Response:
        self._identify(request.headers)
        return JSONResponse({"object": "list", "data": [_describe(self._model())]})

    async def _show_model(self, request: Request) -> Response:
        self._identify(request.headers)
        model, name = self._model(), request.path_params["name"]
        if name != model.card.name:
            raise HttpError(
                404, f"model {name!r} is not served here; {model.card.name!r} is", "model", "model_not_found"
            )
        return JSONResponse(_describe(model))

    async def _health(self, request: Request) -> Response:
        """The worker lives: nothing is asked of the engine, whose loss no restart of a gateway mends."""
        return Response()

    async def _ready(self, request: Request) -> Response:
        """New requests will be served."""
        session = self._generations.require_session()
        if not session.liveness.serving:
            state = session.liveness.state
            raise UnavailableError(
                f"the engine makes no progress, its state is {state.name if state else 'unknown'}", self._retry_after
            )
        return Response()

    async def _metrics(self, request: Request) -> Response:
        body, content_type = await self._exposition.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def _describe_api(self, request: Request) -> Response:
        model = self._generations.link.model
        return Response(openapi_json(model.card.name if model else None), media_type="application/json")

    def _identify(self, headers: Headers) -> Caller:
        return self._generations.identify(headers.get("authorization"))

    def _model(self) -> Model:
        model = self._generations.link.model
        if model is None:
            raise UnavailableError("no model is known yet: no engine was attached", self._retry_after)
        return model


def _app(*routes: Route) -> Starlette:
    return Starlette(
        routes=routes,
        exception_handlers={
            HttpError: _show_refusal,
            GatewayError: _show_failure,
            HTTPException: _show_routing,
            Exception: _show_fault,
        },
    )


class _Endpoint:
    """A route that answers through ``send`` itself; starlette's own would hide a disconnect until the next write."""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ConnectionError):  # nobody is there to be told
            await self._handle(Headers(scope=scope), receive, send)


async def _give(answer: Answer, body: GenerationBody, caller: Caller, receive: Receive, send: Send) -> None:
    """Raises HttpError while nothing is sent, with what is left of the caller's rates."""
    work = answer.stream(send, body.events) if body.stream else answer.send_whole(send)
    try:
        await run_while_connected(receive, work)
    except GatewayError as error:
        refusal = from_gateway(error)
        refusal.headers |= rate_headers(caller)
        raise refusal from error


def _request_id(headers: Headers, prefix: str) -> str:
    """The caller's, or one of ours. Raises HttpError."""
    given = headers.get("x-request-id")
    if given is None:
        return prefix + secrets.token_hex(12)
    if not REQUEST_ID.fullmatch(given):
        raise HttpError(400, "x-request-id must be 1 to 100 visible ASCII characters", "x-request-id")
    return given


def _require_slots(choices: int, slots: int) -> None:
    """Raises HttpError for more choices than a worker can ever run at once: waiting would not help."""
    if choices > slots:
        raise HttpError(
            400,
            f"n times the number of prompts is {choices}, but this gateway has {slots} slots "
            "(bootstrap.slots_per_lane), one for each choice",
            "n",
        )


def _prompt_text(text: str, ids: Iterable[int], model: Model) -> str:
    if text:
        return text
    detokenizer = Detokenizer(model.decode_table)
    known = [index for index in ids if index < model.limits.vocabulary_size]  # others are refused soon
    return detokenizer.push(known) + detokenizer.flush()


def _describe(model: Model) -> dict[str, object]:
    return {
        "id": model.card.name,
        "object": "model",
        "created": 0,  # when its weights were made is not known
        "owned_by": "blink",
        "max_model_len": model.limits.max_context_tokens,
    }


async def _show_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return error.response()


async def _show_failure(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return from_gateway(error).response()


async def _show_routing(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    return HttpError(error.status_code, f"{error.detail}: {what}", headers=error.headers or {}).response()


async def _show_fault(request: Request, error: Exception) -> Response:
    """A fault of ours; the server logs it with its traceback."""
    return HttpError(500, "internal error").response()
