"""Events of blink.v1 as the objects of OpenAI's two generation APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from blink.v1 import inference_pb2 as pb

from services.dpu_gateway.detokenizer import DecodeTable

REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_STOP_STRING: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CANCELLED: "abort",
    pb.FINISH_REASON_TIME_LIMIT: "time_limit",
}

Logprobs = Sequence[tuple[int, pb.TokenLogprobs]]  # (token id, its log-probabilities)
Json = dict[str, Any]


class Format(Protocol):
    """How one API names and shapes things."""

    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> Json | None:
        """What a stream's choice begins with; None for nothing."""

    def delta(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        """One part of a choice."""

    def choice(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        """A whole choice."""

    def logprobs(self, tokens: Logprobs, offset: int) -> Json:
        """``offset`` is where in the choice's text the tokens begin."""


class CompletionFormat:
    """text_completion, whole and in chunks alike."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, table: DecodeTable, echoes: Sequence[str]) -> None:
        """``echoes``: for each choice what it begins with; empty to echo nothing."""
        self._table = table
        self._echoes = echoes

    def opening(self, index: int) -> Json | None:
        return self.delta(index, self._echoes[index], None, None) if self._echoes else None

    def delta(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def choice(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return self.delta(index, (self._echoes[index] if self._echoes else "") + text, logprobs, reason)

    def logprobs(self, tokens: Logprobs, offset: int) -> Json:
        names = [token_text(self._table, index) for index, _ in tokens]
        offsets = []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [logprobs.logprob for _, logprobs in tokens],
            "top_logprobs": [
                {token_text(self._table, top.token_id): top.logprob for top in logprobs.top} for _, logprobs in tokens
            ],
            "text_offset": offsets,
        }


class ChatFormat:
    """chat.completion and chat.completion.chunk."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, table: DecodeTable) -> None:
        self._table = table

    def opening(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        delta = {"content": text} if text or reason is None else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def choice(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, tokens: Logprobs, offset: int) -> Json:
        return {
            "content": [
                self._entry(index, logprobs.logprob)
                | {"top_logprobs": [self._entry(top.token_id, top.logprob) for top in logprobs.top]}
                for index, logprobs in tokens
            ],
            "refusal": None,
        }

    def _entry(self, index: int, logprob: float) -> Json:
        data = self._table.bytes_of[index]
        return {"token": token_text(self._table, index), "logprob": logprob, "bytes": list(data)}


def token_text(table: DecodeTable, index: int) -> str:
    """A token by itself; bytes that are only part of a character become U+FFFD."""
    text = table.texts[index]
    return table.bytes_of[index].decode(errors="replace") if text is None else text


def joined(format_: Format, parts: Sequence[Json]) -> Json:
    """The log-probabilities of a whole choice from those of its parts, each list behind the one before."""
    whole = format_.logprobs((), 0)
    for part in parts:
        for name, values in part.items():
            if values is not None:
                whole[name] += values
    return whole


def usage(prompts: Sequence[int], cached: Sequence[int], outputs: Sequence[int]) -> Json:
    """Token counts of all choices together; a prompt of several choices counts once. ``cached``: of the prompts."""
    prompt, output = sum(prompts), sum(outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(cached)},
    }
