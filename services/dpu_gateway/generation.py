"""One generation from request to end: what every protocol that clients speak has in common."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from blink.v1 import inference_pb2 as pb

from services.common.logging import bound_request, get_logger
from services.dpu_gateway.access.callers import Access, Caller
from services.dpu_gateway.access.limits import Meter
from services.dpu_gateway.errors import (
    FieldError,
    GatewayError,
    Overload,
    OverloadedError,
    UnauthenticatedError,
    UnavailableError,
)
from services.dpu_gateway.link import EngineLink
from services.dpu_gateway.metrics.gateway import GatewayMetrics
from services.dpu_gateway.metrics.request import RequestMetrics
from services.dpu_gateway.model import Model
from services.dpu_gateway.names import Claim
from services.dpu_gateway.output import OutputText
from services.dpu_gateway.request import ChatPrompt, Request, TextPrompt, parse_request, token_budget
from services.dpu_gateway.session import Session
from services.dpu_gateway.streams import Entries, RequestName, Stream
from services.dpu_gateway.tracing import NO_TRACE, SpanTracer, Trace
from services.ring.errors import RingError
from services.ring.schema import FinishReason, LogKind, record_bytes

FINISHED = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.TIME_LIMIT: pb.FINISH_REASON_TIME_LIMIT,
    FinishReason.QUEUE_FULL: pb.FINISH_REASON_CANCELLED,  # of an aborted request; for any other it is a failure
}


Write = Callable[[pb.GenerateResponse], Awaitable[object]]


class Generations:
    """The worker's one way to the ring. Events are those of blink.v1, in the order that inference.proto promises."""

    def __init__(
        self,
        link: EngineLink,
        metrics: GatewayMetrics,
        access: Access,
        *,
        retry_after: float,
        write_limit: float,
        tracer: SpanTracer | None = None,
    ) -> None:
        self.link = link
        self.draining = False
        self.overloads: Counter[Overload] = Counter()
        self._metrics = metrics
        self._access = access
        self._tracer = tracer
        self._retry_after = retry_after
        self._write_limit = write_limit
        self._log = get_logger()
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = 0

    @property
    def open_streams(self) -> int:
        return self._open

    async def wait_until_idle(self) -> None:
        """Return once no generation is open."""
        await self._idle.wait()

    def require_session(self) -> Session:
        """The session that new requests go to. Raises UnavailableError."""
        if self.draining:
            raise UnavailableError("the gateway is stopping", self._retry_after)
        return self.link.require_session()

    def identify(self, authorization: str | None) -> Caller:
        """Who calls, by the ``Authorization`` that came with the call. Raises UnauthenticatedError."""
        try:
            return self._access.identify(authorization)
        except UnauthenticatedError as error:
            self._metrics.refused(error)
            raise

    async def run(
        self, message: pb.GenerateRequest | FieldError, caller: Caller, write: Write, trace: Trace = NO_TRACE
    ) -> None:
        """Await ``write`` with each event until the end. To end it early, cancel the task: that cancels in the engine.

        ``message`` may be why there is none: a request that could not even be read is refused here like any other.
        Raises GatewayError, and whatever ``write`` raises.
        """
        self._open += 1
        self._idle.clear()
        metrics = RequestMetrics(self._metrics)
        request_id = ""
        try:
            if isinstance(message, FieldError):
                raise message
            session = self.require_session()
            request = parse_request(message, session.model.limits)
            request_id = request.request_id
            names = {"caller": caller.name} if caller.name else {}
            with bound_request(request.request_id, **names), caller.admitted() as meter:
                name = RequestName(caller.name, request_id)
                await self._run(session, name, request, meter=meter, metrics=metrics, write=write)
        except GatewayError as error:
            if isinstance(error, OverloadedError):
                self.overloads[error.cause] += 1
            metrics.failed(error)
            raise
        finally:
            metrics.close()
            if self._tracer is not None:
                self._tracer.record(metrics.times(request_id), trace)
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def _run(
        self,
        session: Session,
        name: RequestName,
        request: Request,
        *,
        meter: Meter,
        metrics: RequestMetrics,
        write: Write,
    ) -> None:
        prompt: list[int] | None = None
        try:
            claim = session.claim(name)
            try:
                while True:
                    stream, prompt = await self._submit(session, claim, request, prompt)
                    metrics.submitted(session.model.card.name, len(prompt))
                    if not await _may_try_again(session, stream, request.priority):
                        break
                await self._stream(session, stream, request, len(prompt), meter=meter, metrics=metrics, write=write)
            finally:
                session.leave(claim, UnavailableError("the stream has ended", self._retry_after))
        except FieldError as error:
            self._log.debug("request_invalid", field=error.field)  # the rest may quote the prompt
            raise
        except GatewayError as error:
            # Overload is for metrics: a line for each refusal would add to it.
            log = self._log.debug if isinstance(error, OverloadedError) else self._log.warning
            log("request_failed", code=error.code.name, error=str(error))
            raise

    async def _submit(
        self, session: Session, claim: Claim, request: Request, prompt: list[int] | None
    ) -> tuple[Stream, list[int]]:
        """Tokenize, unless that was done, and write into the lane; the stream and the prompt's ids. The slot is
        reserved first, so that a full gateway refuses at once and tokenizes nothing."""
        try:
            slot = await session.reserve(request.priority)
        except RingError as error:
            raise UnavailableError(str(error), self._retry_after) from error
        try:
            prompt = prompt or await _encode(request, session.model)
            budget = token_budget(request, len(prompt), session.model.limits)
            while True:
                await session.room()
                if self.link.session is not session:
                    raise UnavailableError("the engine was lost before the request began", self._retry_after)
                try:
                    return session.submit(claim, request, slot, prompt, budget), prompt
                except OverloadedError:  # the arena is full
                    if not await session.make_room(request.priority, record_bytes(len(prompt), budget)):
                        raise
        except BaseException as error:
            session.release(slot)
            if isinstance(error, RingError):
                raise UnavailableError(str(error), self._retry_after) from error
            raise

    async def _stream(
        self,
        session: Session,
        stream: Stream,
        request: Request,
        prompt_tokens: int,
        *,
        meter: Meter,
        metrics: RequestMetrics,
        write: Write,
    ) -> None:
        """Write events until the end. Raises what the request failed with."""
        output = OutputText(session.model.decode_table, request.stop_strings)
        accepted = pb.Accepted(request_id=request.request_id, prompt_tokens=prompt_tokens, seed=request.seed)
        stop_ids = session.model.eos_token_ids.union(request.stop_token_ids)
        announced = False
        sent = 0

        async def send(**event: pb.Accepted | pb.TokenChunk | pb.Finished) -> None:
            response = pb.GenerateResponse(**event)  # type: ignore[arg-type]
            await stream.send(write(response), self._write_limit, self._retry_after)

        while True:
            await stream.wait()
            stream.raise_failure(self._retry_after)
            if not announced:
                announced = True
                metrics.accepted()
                meter.use(prompt_tokens)
                await send(accepted=accepted)
                stream.raise_failure(self._retry_after)
            reason = stream.finish  # before the tokens: what comes later waits for the next round
            if stream.with_logprobs:
                ids, logprobs = _logprobs(stream.take_entries())
            else:
                ids, logprobs = stream.take_tokens(), []
            if ids:
                ends_with_stop = reason is FinishReason.STOP and ids[-1] in stop_ids  # a mark, not text
                piece = output.push(ids[:-1] if ends_with_stop else ids)
                if piece.matched is not None:
                    del ids[piece.used :], logprobs[piece.used :]
                chunk = pb.TokenChunk(
                    text=piece.text, token_ids=ids, logprobs=logprobs, cached_tokens=stream.cached_tokens
                )
                sent += len(ids)
                meter.use(len(ids))
                metrics.tokens(len(ids), stream.queue_seconds)
                await send(chunk=chunk)
                if piece.matched is not None:
                    finished = pb.Finished(reason=pb.FINISH_REASON_STOP_STRING, stop_string=piece.matched)
                    break
            if reason is not FinishReason.NONE:
                last = output.flush()
                kind = FINISHED[reason] if last.matched is None else pb.FINISH_REASON_STOP_STRING
                finished = pb.Finished(reason=kind, stop_string=last.matched or "", text=last.text)
                break
        finished.usage.prompt_tokens = prompt_tokens
        finished.usage.completion_tokens = sent
        finished.usage.cached_tokens = stream.cached_tokens
        metrics.finished(finished.reason)
        await send(finished=finished)


async def _may_try_again(session: Session, stream: Stream, priority: int) -> bool:
    """Return once the engine has queued the request or refused it; whether its queue was full and has room now, as a
    request of lower priority gave way."""
    await stream.wait()
    stream.wake()  # for whoever waits next
    if stream.finish is not FinishReason.QUEUE_FULL or stream.error is not None or stream.abort_requested:
        return False
    return await session.make_room(priority)


async def _encode(request: Request, model: Model) -> list[int]:
    match request.prompt:
        case TextPrompt(text):
            return await model.encoder.encode_text(text)
        case ChatPrompt(messages):
            return await model.encoder.encode_chat(messages)
        case tokens:
            return tokens.ids


def _logprobs(entries: Entries) -> tuple[list[int], list[pb.TokenLogprobs]]:
    """Ids and their log-probabilities from whole tokens' log entries."""
    ids: list[int] = []
    logprobs: list[pb.TokenLogprobs] = []
    top: list[pb.TopLogprob] = []
    columns = (entries["kind"].tolist(), entries["token"].tolist(), entries["value"].tolist())
    for kind, token, value in zip(*columns, strict=True):
        if kind == LogKind.TOP_LOGPROB:
            top.append(pb.TopLogprob(token_id=token, logprob=value))
        else:
            ids.append(token)
            logprobs.append(pb.TokenLogprobs(logprob=value, top=top))
            top = []
    return ids, logprobs
