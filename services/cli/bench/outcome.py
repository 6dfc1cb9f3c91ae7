"""What became of one request, as the client saw it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """Times are seconds of the monotonic clock, which all processes of a machine share."""

    scheduled: float
    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of events with tokens; those that came together count once
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def good(self) -> bool:
        """It was answered to its end."""
        return not self.error and bool(self.arrivals)

    @property
    def lateness(self) -> float:
        """By how much it was sent after its time: the load generator's fault."""
        return self.sent - self.scheduled

    @property
    def ttft(self) -> float:
        """Time to first token, from sending."""
        return self.arrivals[0] - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean time per output token, the first left out; None for a single token."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def end_to_end(self) -> float:
        return self.arrivals[-1] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: from one arrival to the next."""
        return [now - before for before, now in zip(self.arrivals, self.arrivals[1:], strict=False)]
