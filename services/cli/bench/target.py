"""Who is measured, and by which protocol."""

from __future__ import annotations

from dataclasses import dataclass

from services.cli.bench.kinds import Prompts, Protocol


@dataclass(frozen=True, slots=True)
class Target:
    """What every process of the load generator must know of the server and of each request."""

    protocol: Protocol
    address: str  # of gRPC, or an OpenAI base URL
    model: str
    prompts: Prompts
    vocabulary: int  # ids are below it
    temperature: float
    ignore_eos: bool  # so that outputs are as long as asked
    timeout: float  # seconds for a request
    api_key: str = ""
