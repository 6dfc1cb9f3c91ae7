"""Renders chat messages with the model's own template, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.dpu_gateway.errors import FieldError


class TemplateRefusedError(jinja2.TemplateError):
    """The template itself called raise_exception."""


class ChatTemplate:
    """A Hugging Face chat template: the same environment, filters and globals as transformers gives one.

    An empty ``source`` stands for a model without a template. A template that does not compile is reported to callers
    who send chat messages; text and token ids still work.
    """

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._template: jinja2.Template | None = None
        self._unusable = "the model has no chat template; send text or token_ids"
        if not source:
            return
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            self._unusable = f"the model's chat template does not compile (line {error.lineno}: {error.message})"

    @property
    def usable(self) -> bool:
        return self._template is not None

    def require(self) -> jinja2.Template:
        """The compiled template. Raises FieldError for ``chat`` when there is none."""
        if self._template is None:
            raise FieldError("chat", f"cannot be used: {self._unusable}")
        return self._template

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt for ``messages``, ready for the assistant's turn.

        Raises FieldError when the model has no usable template, or its template refuses the messages.
        """
        template = self.require()
        try:
            return template.render(messages=list(messages), add_generation_prompt=True, **self._tokens)
        except TemplateRefusedError as error:
            raise FieldError("chat.messages", f"are refused by the model's chat template: {error.message}") from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise FieldError("chat.messages", f"cannot be rendered by the model's chat template: {error}") from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(text: str) -> NoReturn:
    raise TemplateRefusedError(text)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
