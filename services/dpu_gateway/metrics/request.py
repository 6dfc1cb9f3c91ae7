"""Takes one request's times and counts how it ended."""

from __future__ import annotations

import time
from typing import ClassVar

from blink.v1 import inference_pb2 as pb

from services.dpu_gateway.errors import GatewayError, Overload, OverloadedError
from services.dpu_gateway.metrics.gateway import End, GatewayMetrics, ModelMetrics
from services.dpu_gateway.tracing import RequestTimes


class RequestMetrics:
    """Made when the request arrives, told what happens to it, closed exactly once. Times are monotonic seconds."""

    __slots__ = (
        "_accepted",
        "_arrived",
        "_end",
        "_first",
        "_last",
        "_metrics",
        "_model",
        "_model_name",
        "_prompt_tokens",
        "_queue_seconds",
        "_refusal",
        "_tokens",
    )

    ENDS: ClassVar[dict[pb.FinishReason, End]] = {
        pb.FINISH_REASON_STOP: End.STOP,
        pb.FINISH_REASON_STOP_STRING: End.STOP,
        pb.FINISH_REASON_LENGTH: End.LENGTH,
        pb.FINISH_REASON_CANCELLED: End.ABORT,
        pb.FINISH_REASON_TIME_LIMIT: End.TIME_LIMIT,
    }

    OVERLOADS: ClassVar[dict[Overload, End]] = {Overload.SLOW_READER: End.SLOW_READER, Overload.SHED: End.SHED}

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._arrived = time.monotonic()
        self._first = self._last = 0.0
        self._tokens = 0
        self._prompt_tokens = 0
        self._model: ModelMetrics | None = None
        self._model_name = ""
        self._queue_seconds = 0.0
        self._accepted = False
        self._refusal = ""  # why it was not accepted
        self._end = End.ABORT  # unless something else is said
        metrics.open_requests.inc()

    def submitted(self, model: str, prompt_tokens: int) -> None:
        """The request is in the lane."""
        self._model, self._model_name = self._metrics.of_model(model), model
        self._prompt_tokens = prompt_tokens

    def accepted(self) -> None:
        """The engine has queued it."""
        self._accepted = True

    def tokens(self, count: int, queue_seconds: float) -> None:
        """``count`` tokens came together; the engine says how long the request was queued before its first."""
        model = self._model
        assert model is not None
        now = time.monotonic()
        if self._tokens:
            model.between_tokens.observe_many((now - self._last) / count, count)
        else:
            self._first, self._queue_seconds = now, queue_seconds
            model.first_token.observe(now - self._arrived)
            model.queue.observe(queue_seconds)
            model.prefill.observe(max(0.0, now - self._arrived - queue_seconds))
            if count > 1:  # they came at once
                model.between_tokens.observe_many(0.0, count - 1)
        self._last = now
        self._tokens += count

    def finished(self, reason: pb.FinishReason) -> None:
        """The stream ends with Finished."""
        self._end = self.ENDS[reason]

    def failed(self, error: GatewayError) -> None:
        """The stream ends with a status."""
        self._end = self.OVERLOADS.get(error.cause, End.ERROR) if isinstance(error, OverloadedError) else End.ERROR
        if not self._accepted:
            self._refusal = self._metrics.refused(error)

    def times(self, request_id: str) -> RequestTimes:
        """What a trace shows of the request; once it is closed."""
        epoch = time.time() - time.monotonic()
        waited = self._arrived + self._queue_seconds
        return RequestTimes(
            request_id=request_id,
            model=self._model_name,
            arrived=self._arrived + epoch,
            admitted=waited + epoch if self._tokens else 0.0,
            first_token=self._first + epoch if self._tokens else 0.0,
            last_token=self._last + epoch if self._tokens else 0.0,
            ended=time.time(),
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._tokens,
            end=self._refusal or self._end.value,
            failed=bool(self._refusal) or self._end in {End.ERROR, End.SLOW_READER, End.SHED},
        )

    def close(self) -> None:
        """Nothing more happens to it, whether or not anybody said how it ended."""
        self._metrics.open_requests.dec()
        model = self._model
        if model is None or self._refusal:
            return
        model.ends[self._end].inc()
        model.prompt_length.observe(self._prompt_tokens)
        model.output_length.observe(self._tokens)
        model.end_to_end.observe(time.monotonic() - self._arrived)
        if self._tokens:
            model.decode.observe(self._last - self._first)
        if self._tokens > 1:
            model.time_per_token.observe((self._last - self._first) / (self._tokens - 1))
