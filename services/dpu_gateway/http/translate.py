"""OpenAI's requests as messages of blink.v1, which are then validated like any other."""

from __future__ import annotations

from blink.v1 import inference_pb2 as pb

from services.dpu_gateway.choices import MAX_CHOICES, U64, named, repeated
from services.dpu_gateway.http.errors import HttpError
from services.dpu_gateway.http.schema import ChatCompletionBody, CompletionBody, GenerationBody

SAMPLING = (*("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),)
# OpenAI renamed the role; the templates of open models know the old name.
ROLES = {"developer": "system"}


def completion_messages(body: CompletionBody, request_id: str) -> list[pb.GenerateRequest]:
    """One for each choice, in the order of the answer's indices: prompt by prompt, ``n`` of each. Raises HttpError."""
    prompts = _prompts(body)
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        raise HttpError(400, f"n times the number of prompts is over {MAX_CHOICES}", "n")
    if body.echo and body.logprobs is not None:
        raise HttpError(400, "echo with logprobs is not supported: prompts are not scored", "logprobs")
    messages = []
    for prompt in prompts:
        message = _common(body, body.max_tokens)
        if isinstance(prompt, str):
            message.text = prompt
        else:
            message.token_ids.ids.extend(prompt)
        if body.logprobs is not None:
            message.logprobs = body.logprobs
        messages += repeated(message, body.n or 1)
    return named(messages, request_id)


def chat_messages(body: ChatCompletionBody, request_id: str) -> list[pb.GenerateRequest]:
    """``n`` messages. Raises HttpError."""
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise HttpError(400, "max_tokens and max_completion_tokens are both set", "max_tokens")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    message = _common(body, limit)
    message.chat.SetInParent()
    for turn in body.messages:
        text = turn.content if isinstance(turn.content, str) else "".join(part.text for part in turn.content)
        message.chat.messages.add(role=ROLES.get(turn.role, turn.role), content=text)
    if body.logprobs:
        message.logprobs = body.top_logprobs or 0
    elif body.top_logprobs is not None:
        raise HttpError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
    return named(repeated(message, body.n or 1), request_id)


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if not prompt:
        raise HttpError(400, "prompt is empty", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    several = [item for item in prompt if not isinstance(item, int)]
    return several or [[item for item in prompt if isinstance(item, int)]]


def _common(body: GenerationBody, max_tokens: int | None) -> pb.GenerateRequest:
    message = pb.GenerateRequest(model=body.model)
    if not body.model:
        raise HttpError(400, "model is empty", "model")
    for name in SAMPLING:
        value = getattr(body, name)
        if value is not None:
            setattr(message.sampling, name, value)
    if body.top_k is not None:
        message.sampling.top_k = max(0, body.top_k)
    if body.seed is not None:
        message.sampling.seed = body.seed % U64
    if max_tokens is not None:
        message.stop.max_tokens = max_tokens
    if body.min_tokens is not None:
        message.stop.min_tokens = body.min_tokens
    if body.stop is not None:
        message.stop.strings.extend([body.stop] if isinstance(body.stop, str) else body.stop)
    message.stop.token_ids.extend(body.stop_token_ids or ())
    if body.ignore_eos is not None:
        message.stop.ignore_eos = body.ignore_eos
    if body.priority is not None:
        message.priority = body.priority
    message.cache_salt = body.cache_salt or ""
    message.no_prefix_cache = bool(body.no_prefix_cache)
    return message
