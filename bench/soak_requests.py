"""What the soak asks, and what it demands of each answer."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.ring.record import pack_record
from services.ring.schema import DescriptorFlag, FinishReason, LogKind, RejectCode

PROMPT, GENERATED = 600, 200  # the most of a request
EOS = 0
CANONICAL = 8  # prompts that come again and again, greedy
CLEAR_MARGIN = 0.1  # between the two likeliest tokens' log-probabilities; rounding moves them by a hundredth
_HOSTILE: tuple[tuple[dict[str, Any], RejectCode], ...] = (
    ({"prompt": [1, (1 << 32) - 1, 2]}, RejectCode.BAD_TOKEN_ID),
    ({"top_p": math.nan}, RejectCode.BAD_SAMPLING),
    ({"max_tokens": 0}, RejectCode.BAD_TOKEN_BUDGET),
    ({"priority": 5}, RejectCode.BAD_PRIORITY),
    ({"prompt": []}, RejectCode.EMPTY_PROMPT),
)


class SoakError(AssertionError):
    """The engine has done what it must not."""


def demand(condition: bool, message: str, *about: object) -> None:
    """Raises SoakError when the condition does not hold."""
    if not condition:
        raise SoakError(f"{message}: {', '.join(map(repr, about))}")


@dataclass
class Ask:
    """One request: ``fields`` are pack_record's."""

    fields: dict[str, Any]
    canonical: int = -1
    refused_with: RejectCode = RejectCode.NONE
    cancel_after: int = -1  # tokens; -1 for never

    def record(self, slot: int) -> bytes:
        return pack_record(**self.fields, slot=slot)


class Asker:
    """Makes random requests; ``seed`` fixes them."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._random = random.Random(seed)
        self.vocabulary = vocabulary
        tokens = np.random.default_rng(99)
        self._canonical = [tokens.integers(1, vocabulary, 20 + 60 * i).tolist() for i in range(CANONICAL)]

    def ask(self) -> Ask:
        pick = self._random
        if pick.random() < 0.15:
            which = pick.randrange(CANONICAL)
            flags = DescriptorFlag.LOGPROBS | DescriptorFlag.IGNORE_EOS
            fields = {"prompt": self._canonical[which], "max_tokens": 48, "temperature": 0.0}
            return Ask({**fields, "top_logprobs": 2, "flags": flags}, canonical=which)
        fields = self._any()
        if pick.random() < 0.02:
            changes, code = pick.choice(_HOSTILE)
            return Ask(fields | changes, refused_with=code)
        return Ask(fields, cancel_after=pick.randint(0, 60) if pick.random() < 0.15 else -1)

    def _any(self) -> dict[str, Any]:
        pick = self._random
        length = pick.randint(1, PROMPT) if pick.random() < 0.3 else pick.randint(1, 80)
        most = pick.randint(1, GENERATED)
        fields: dict[str, Any] = {
            "prompt": [pick.randrange(self.vocabulary) for _ in range(length)],
            "max_tokens": most,
            "min_tokens": pick.randint(0, most) if pick.random() < 0.2 else 0,
            "seed": pick.getrandbits(64),
            "priority": pick.randint(-4, 4),
            "temperature": pick.choice((0.0, 0.7, 1.0, 2.0)),
            "flags": pick.choice((DescriptorFlag(0), DescriptorFlag.IGNORE_EOS)),
        }
        for name, values in (
            ("top_k", (1, 40, 1000)),
            ("top_p", (0.1, 0.9)),
            ("min_p", (0.05, 0.5)),
            ("repetition_penalty", (0.8, 1.3)),
            ("presence_penalty", (-1.0, 1.5)),
            ("frequency_penalty", (-0.5, 1.0)),
            ("time_limit_ms", (1, 20, 500)),
            ("stop_tokens", ([5, 6], list(range(16)))),
        ):
            if pick.random() < 0.15:
                fields[name] = pick.choice(values)
        if pick.random() < 0.2:
            fields["flags"] |= DescriptorFlag.LOGPROBS
            fields["top_logprobs"] = pick.choice((0, 1, 5, 20))
        return fields


@dataclass
class Answer:
    """What came of a request, checked entry by entry."""

    ask: Ask
    position: int
    slot: int
    vocabulary: int
    cancelled: bool = False
    admitted: bool = False
    reason: FinishReason | None = None
    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)  # of the two likeliest; canonical requests alone
    _tops: list[float] = field(default_factory=list)

    def take(self, kind: int, token: int, value: float, detail: int) -> None:
        """One log entry. Raises SoakError."""
        demand(self.reason is None, "an entry after FINISH", self)
        if kind == LogKind.FINISH:
            self.reason = FinishReason(detail)
            self._check_end(RejectCode(token))
        elif kind == LogKind.ADMITTED:
            demand(not self.admitted, "admitted twice", self)
            self.admitted = True
        else:
            demand(self.admitted and 0 <= token < self.vocabulary, "a token of none or before ADMITTED", token, self)
            wanted = bool(self.ask.fields.get("flags", 0) & DescriptorFlag.LOGPROBS)
            demand(
                value <= 1e-3 if wanted else value == 0 or kind == LogKind.TOP_LOGPROB, "log-probability", value, self
            )
            if kind == LogKind.TOP_LOGPROB:
                self._tops.append(value)
                return
            demand(len(self._tops) == self.ask.fields.get("top_logprobs", 0), "alternatives", self._tops, self)
            demand(self._tops == sorted(self._tops, reverse=True), "alternatives are not in order", self._tops, self)
            if self.ask.canonical >= 0:
                self.margins.append(self._tops[0] - self._tops[1])
            self._tops = []
            self.tokens.append(token)

    def _check_end(self, code: RejectCode) -> None:
        fields, tokens, reason = self.ask.fields, self.tokens, self.reason
        ends = set(fields.get("stop_tokens", ()))
        if not fields.get("flags", 0) & DescriptorFlag.IGNORE_EOS:
            ends.add(EOS)
        stopped = reason is FinishReason.STOP
        demand(len(tokens) <= max(fields["max_tokens"], 0), "too many tokens", self)
        demand(not ends.intersection(tokens[:-1] if stopped else tokens), "went on after an end token", self)
        refused = self.ask.refused_with
        if refused is not RejectCode.NONE:
            good = (reason is FinishReason.REJECTED and code is refused) or reason is FinishReason.QUEUE_FULL
            demand(good and not tokens, "a hostile record was not refused", code, self)
            return
        match reason:
            case FinishReason.LENGTH:
                good = len(tokens) == fields["max_tokens"]
            case FinishReason.STOP:
                good = tokens[-1] in ends and len(tokens) > fields.get("min_tokens", 0)
            case FinishReason.CANCELLED:
                good = self.cancelled
            case FinishReason.TIME_LIMIT:
                good = "time_limit_ms" in fields
            case _:
                good = reason is FinishReason.QUEUE_FULL and not tokens
        demand(good, "ended without cause", code, self)


class Repeats:
    """Greedy answers to the canonical prompts: always the same, up to where two tokens were nearly as likely.

    Attributes:
        equal: answers that were the first one's to the last token.
        ties: that parted where the margin was not clear.
    """

    def __init__(self) -> None:
        self._first: dict[int, Answer] = {}
        self.equal = self.ties = 0

    def check(self, answer: Answer) -> None:
        """Raises SoakError."""
        if answer.ask.canonical < 0 or not answer.tokens:
            return
        first = self._first.setdefault(answer.ask.canonical, answer)
        if len(answer.tokens) > len(first.tokens):
            self._first[answer.ask.canonical] = answer
        for place, (a, b) in enumerate(zip(first.tokens, answer.tokens, strict=False)):
            if a != b:
                margin = max(first.margins[place], answer.margins[place])
                demand(margin < CLEAR_MARGIN, f"greedy answers differ at token {place}, margin {margin}", first, answer)
                self.ties += 1
                return
        self.equal += 1
