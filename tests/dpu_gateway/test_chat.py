from __future__ import annotations

import json
from datetime import datetime

import pytest

from services.dpu_gateway.chat import ChatTemplate
from services.dpu_gateway.errors import FieldError

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "hello <b> & bye"}]


def render(source: str, messages: list[dict[str, str]] = HELLO) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages)


def test_messages_are_rendered_up_to_the_assistants_turn() -> None:
    assert render(CHATML) == "<|im_start|>user\nhello <b> & bye<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_has_what_transformers_gives_it() -> None:
    assert render("{{ bos_token }}|{{ eos_token }}") == "<s>|</s>"
    assert json.loads(render("{{ messages | tojson }}")) == HELLO
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().astimezone().year)
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"


def test_a_model_without_a_template_refuses_chat_and_says_what_to_send_instead() -> None:
    template = ChatTemplate("", "", "")
    assert not template.usable
    with pytest.raises(FieldError, match="no chat template; send text or token_ids") as caught:
        template.render(HELLO)
    assert caught.value.field == "chat"


def test_a_template_that_does_not_compile_is_reported_with_its_line() -> None:
    with pytest.raises(FieldError, match=r"does not compile \(line 2"):
        render("ok\n{% if %}")


def test_a_refusal_by_the_template_reaches_the_caller() -> None:
    with pytest.raises(FieldError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.field == "chat.messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ messages[99].content.x }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox_or_crash_the_gateway(source: str) -> None:
    with pytest.raises(FieldError, match="cannot be rendered"):
        render(source)
