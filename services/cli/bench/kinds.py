"""What a load can be of, for options and load generator alike; no numpy here, so that ``blink --help`` is instant."""

from __future__ import annotations

from enum import StrEnum


class Protocol(StrEnum):
    """What is spoken to the server."""

    GRPC = "grpc"  # blink.v1
    COMPLETIONS = "completions"  # OpenAI's, streamed
    CHAT = "chat"  # OpenAI's chat completions, streamed


class Prompts(StrEnum):
    """What made prompts consist of."""

    IDS = "ids"  # random token ids: their number is exact
    TEXT = "text"  # common English words: about a token each, the server says how many


class Arrivals(StrEnum):
    """How the gaps between requests are distributed around their mean."""

    CONSTANT = "constant"
    POISSON = "poisson"
    BURSTY = "bursty"  # gamma-distributed gaps whose shape is below 1
