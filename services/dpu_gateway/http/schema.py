"""Bodies of OpenAI's requests. What Blink does not do is refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, from_json

from services.dpu_gateway.choices import MAX_CHOICES
from services.dpu_gateway.errors import clipped
from services.dpu_gateway.http.errors import HttpError
from services.dpu_gateway.request import MAX_CACHE_SALT_CHARS, MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS
from services.ring.schema import (
    MAX_ADDITIVE_PENALTY,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKENS,
    MAX_TEMPERATURE,
    MAX_TOP_LOGPROBS,
    MIN_PRIORITY,
)

MAX_U32 = (1 << 32) - 1
MAX_QUOTED = 64

Tokens = Annotated[int, Field(ge=0, le=MAX_U32)]
TokenId = Annotated[int, Field(ge=0, le=MAX_U32)]
Body = TypeVar("Body", bound="GenerationBody")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def documented(description: str | None = None, **limits: Any) -> Any:
    """An optional field whose limits, in JSON Schema's words, the OpenAPI document tells; request.py checks them, for
    both protocols alike."""
    return Field(None, description=description, json_schema_extra=limits)


def between(low: float, high: float, description: str | None = None, *, above: bool = False) -> Any:
    """The same for a range; ``above``: ``low`` itself is out."""
    return documented(description, **{"exclusiveMinimum" if above else "minimum": low, "maximum": high})


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="not OpenAI's; with include_usage, in every event")


class GenerationBody(Strict):
    """What both APIs take. Beyond OpenAI's own fields those that vLLM's users know."""

    # Fields of OpenAI's API that are not served, and the values of them that ask for nothing.
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"logit_bias": ({},)}

    model: str
    max_tokens: Tokens | None = None
    temperature: float | None = between(0, MAX_TEMPERATURE)
    top_p: float | None = between(0, 1, above=True)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = documented(
        minLength=1,
        maxLength=MAX_STOP_STRING_CHARS,
        maxItems=MAX_STOP_STRINGS,
        items={"minLength": 1, "maxLength": MAX_STOP_STRING_CHARS},
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = between(-MAX_ADDITIVE_PENALTY, MAX_ADDITIVE_PENALTY)
    frequency_penalty: float | None = between(-MAX_ADDITIVE_PENALTY, MAX_ADDITIVE_PENALTY)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    user: str | None = Field(None, description="accepted and not used")

    top_k: int | None = Field(None, ge=-1, le=MAX_U32, description="not OpenAI's; 0 or -1 keeps all")
    min_p: float | None = between(0, 1, "not OpenAI's")
    repetition_penalty: float | None = between(0, MAX_REPETITION_PENALTY, "not OpenAI's", above=True)
    min_tokens: Tokens | None = Field(None, description="not OpenAI's")
    stop_token_ids: list[TokenId] | None = documented("not OpenAI's", maxItems=MAX_STOP_TOKENS)
    ignore_eos: bool | None = Field(None, description="not OpenAI's")
    priority: int | None = Field(
        None,
        ge=-(1 << 31),
        lt=1 << 31,
        description="not OpenAI's; higher goes first",
        json_schema_extra={"minimum": MIN_PRIORITY, "maximum": MAX_PRIORITY},
    )
    cache_salt: str | None = documented(
        "not OpenAI's; only requests of one salt share cached beginnings of prompts", maxLength=MAX_CACHE_SALT_CHARS
    )
    no_prefix_cache: bool | None = Field(None, description="not OpenAI's; neither found in the prefix cache nor kept")

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """With the fields that are not served, and what they may say."""
        schema = handler.resolve_ref_schema(handler(core))
        for name, idle in cls.unsupported.items():
            schema["properties"][name] = {"enum": [None, *idle], "description": "not supported"}
        return schema

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Parse a request's body. Raises HttpError naming the field."""
        try:
            values = from_json(data, allow_inf_nan=False)
        except ValueError as error:
            raise HttpError(400, f"the body is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise HttpError(400, "the body is not a JSON object")
        for name, idle in cls.unsupported.items():
            value = values.pop(name, None)
            if value is not None and not any(type(value) is type(each) and value == each for each in idle):
                raise HttpError(400, f"{name} is not supported", name, "unsupported_parameter")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise _refusal(error.errors(include_url=False)) from error

    @property
    def events(self) -> StreamOptions:
        """What a stream's events are to carry."""
        return self.stream_options or StreamOptions()


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    unsupported = {**GenerationBody.unsupported, "suffix": ("",), "best_of": (1,)}

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = Field(
        json_schema_extra={"minLength": 1, "minItems": 1}
    )
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_U32, json_schema_extra={"maximum": MAX_TOP_LOGPROBS})


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: str = Field(json_schema_extra={"minLength": 1})
    content: str | list[TextPart]
    name: str | None = Field(None, description="accepted and not used")


class ChatCompletionBody(GenerationBody):
    """POST /v1/chat/completions."""

    unsupported = {
        **GenerationBody.unsupported,
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "prediction": (),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "web_search_options": (),
    }

    messages: list[Message] = Field(json_schema_extra={"minItems": 1})
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_U32, json_schema_extra={"maximum": MAX_TOP_LOGPROBS})
    parallel_tool_calls: bool | None = Field(None, description="accepted and not used: there are no tools")
    metadata: dict[str, str] | None = Field(None, description="accepted and not used")
    service_tier: Literal["auto", "default"] | None = Field(None, description="accepted and not used")


def _refusal(problems: list[ErrorDetails]) -> HttpError:
    # A union reports each of its branches; the one that got furthest into the value says most.
    problem = max(problems, key=lambda each: len(each["loc"]))
    parts = [part for part in problem["loc"] if not (isinstance(part, str) and ("[" in part or part in BRANCHES))]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
    match problem["type"]:
        case "missing":
            return HttpError(400, f"{name} is missing", name, "missing_required_parameter")
        case "extra_forbidden":
            return HttpError(
                400, f"{clipped(name, MAX_QUOTED)} is not a parameter of this API", name, "unknown_parameter"
            )
    limit = problem["msg"].removeprefix("Input ").lower()
    return HttpError(400, f"{name}: {limit}, not {clipped(repr(problem['input']), MAX_QUOTED)}", name)


BRANCHES = frozenset({"str", "int", "constrained-int"})
