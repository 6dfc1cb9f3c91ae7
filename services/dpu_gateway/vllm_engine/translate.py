"""Messages of vllm.grpc.engine as those of blink.v1, and back."""

from __future__ import annotations

from collections.abc import Sequence

from blink.v1 import inference_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from services.dpu_gateway.choices import MAX_CHOICES, U64, named, repeated
from services.dpu_gateway.errors import FieldError

REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_STOP_STRING: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CANCELLED: "abort",
    pb.FINISH_REASON_TIME_LIMIT: "abort",
}
# In the dialect these are not optional: zero stands for what was not set.
UNSET_WHEN_ZERO = ("top_p", "repetition_penalty")
ZERO_IS_THE_DEFAULT = ("top_k", "min_p", "presence_penalty", "frequency_penalty")


def to_blink(request: vllm.GenerateRequest) -> list[pb.GenerateRequest]:
    """One message for each choice. Raises FieldError for what Blink does not do."""
    params = request.sampling_params
    _refuse_unsupported(request, params)
    message = pb.GenerateRequest()
    match request.WhichOneof("input"):
        case "tokenized":
            message.token_ids.ids.extend(request.tokenized.input_ids)
        case "text":
            message.text = request.text
    for name in UNSET_WHEN_ZERO:
        if getattr(params, name):
            setattr(message.sampling, name, getattr(params, name))
    for name in ZERO_IS_THE_DEFAULT:
        setattr(message.sampling, name, getattr(params, name))
    if params.HasField("temperature"):
        message.sampling.temperature = params.temperature
    if params.HasField("seed"):
        message.sampling.seed = params.seed % U64
    if params.HasField("max_tokens"):
        message.stop.max_tokens = params.max_tokens
    message.stop.min_tokens = params.min_tokens
    message.stop.strings.extend(params.stop)
    message.stop.token_ids.extend(params.stop_token_ids)
    message.stop.ignore_eos = params.ignore_eos
    if params.HasField("logprobs"):
        if params.logprobs < 0:
            raise FieldError("sampling_params.logprobs", f"is {params.logprobs}: all of them are not supported")
        message.logprobs = params.logprobs
    count = params.n or 1
    if count > MAX_CHOICES:
        raise FieldError("sampling_params.n", f"is {count}, at most {MAX_CHOICES}")
    return named(repeated(message, count), request.request_id)


def _refuse_unsupported(request: vllm.GenerateRequest, params: vllm.SamplingParams) -> None:
    for name in ("mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json"):
        if request.HasField(name):
            raise FieldError(name, "is not supported")
    constraint = params.WhichOneof("constraint")
    if constraint is not None:
        raise FieldError(f"sampling_params.{constraint}", "is not supported: output is not constrained")
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if params.HasField(name):
            raise FieldError(f"sampling_params.{name}", "is not supported")
    if params.logit_bias:
        raise FieldError("sampling_params.logit_bias", "is not supported")


class Choice:
    """One choice's answer, gathered until it is complete."""

    def __init__(self, index: int, stop_token_ids: Sequence[int]) -> None:
        self._index = index
        self._stop_token_ids = frozenset(stop_token_ids)
        self._prompt_tokens = 0
        self._ids: list[int] = []
        self._logprobs = vllm.OutputLogProbs()

    def take(self, event: pb.GenerateResponse) -> vllm.GenerateResponse | None:
        """The event in the dialect, if it has one: a part, or the end with all ids."""
        if event.HasField("accepted"):
            self._prompt_tokens = event.accepted.prompt_tokens
            return None
        return self._part(event.chunk) if event.HasField("chunk") else self._complete(event.finished)

    def _part(self, chunk: pb.TokenChunk) -> vllm.GenerateResponse:
        """As vLLM counts in a part: the prompt's tokens are all of them, the completion's this part's alone."""
        self._ids += chunk.token_ids
        logprobs = _logprobs(chunk)
        self._logprobs.MergeFrom(logprobs)
        part = vllm.GenerateStreamChunk(
            token_ids=chunk.token_ids,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(chunk.token_ids),
            cached_tokens=chunk.cached_tokens,
            index=self._index,
        )
        if chunk.logprobs:
            part.output_logprobs.CopyFrom(logprobs)
        return vllm.GenerateResponse(chunk=part)

    def _complete(self, finished: pb.Finished) -> vllm.GenerateResponse:
        whole = vllm.GenerateComplete(
            output_ids=self._ids,
            finish_reason=REASONS[finished.reason],
            prompt_tokens=finished.usage.prompt_tokens,
            completion_tokens=finished.usage.completion_tokens,
            cached_tokens=finished.usage.cached_tokens,
            index=self._index,
        )
        if self._logprobs.token_ids:
            whole.output_logprobs.CopyFrom(self._logprobs)
        if finished.reason == pb.FINISH_REASON_STOP_STRING:
            whole.matched_stop_str = finished.stop_string
        elif finished.reason == pb.FINISH_REASON_STOP and self._ids and self._ids[-1] in self._stop_token_ids:
            whole.matched_token_id = self._ids[-1]
        return vllm.GenerateResponse(complete=whole)


def _logprobs(chunk: pb.TokenChunk) -> vllm.OutputLogProbs:
    if not chunk.logprobs:
        return vllm.OutputLogProbs()
    return vllm.OutputLogProbs(
        token_logprobs=[each.logprob for each in chunk.logprobs],
        token_ids=chunk.token_ids,
        top_logprobs=[
            vllm.TopLogProbs(values=[top.logprob for top in each.top], token_ids=[top.token_id for top in each.top])
            for each in chunk.logprobs
        ],
    )
