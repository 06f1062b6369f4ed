"""Templates are rendered as transformers renders them, and cannot leave the sandbox."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from edgeduet_client.llm.chat_template import ChatTemplate
from edgeduet_client.llm.errors import ModelError, RequestError

CHATML = """{% for message in messages %}
    {% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
"""
ALTERNATING = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Conversation roles must alternate') }}
{% endif %}
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}{{ eos_token }}
{% else %}[INST] {{ message['content'] }} [/INST]{% endif %}
{% endfor %}"""
FEATURES = """{%- set ns = namespace(count=0) -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
{%- set ns.count = ns.count + 1 -%}
{{ message | tojson }}{{ message | tojson(indent=2) }}
{%- endfor -%}
{{ ns.count }} {{ dict(a=1).a }} {{ tools is none }} {{ strftime_now('%Y') | length }}"""

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "  <b>Hé & 漢</b>\n"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n"}, {"role": "user", "content": "c"}],
]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("template", [CHATML, ALTERNATING, FEATURES])
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_rendered_as_transformers_does(
    template: str, messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    ours = ChatTemplate(template, special_tokens=NAMES)
    try:
        rendered, _ = render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=add_generation_prompt, **NAMES
        )
    except TemplateError:
        with pytest.raises(RequestError, match="roles must alternate"):
            ours.render(messages, add_generation_prompt=add_generation_prompt)
    else:
        assert ours.render(messages, add_generation_prompt=add_generation_prompt) == rendered[0]


def test_what_is_none_counts_as_absent() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.name is defined }}{% endfor %}")
    assert template.render([{"role": "user", "content": "x", "name": None}]) == "False"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_a_template_stays_in_its_sandbox(attack: str) -> None:
    with pytest.raises(RequestError, match="refuses these messages"):
        ChatTemplate(attack).render([{"role": "user", "content": "x"}])


def test_a_template_that_breaks_on_the_messages_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="check their roles and their order") as caught:
        ChatTemplate("{{ messages[5].content + 1 }}").render([{"role": "user", "content": "x"}])
    assert caught.value.field == "messages"


def test_a_template_that_does_not_compile_names_the_line() -> None:
    with pytest.raises(ModelError, match="does not compile \\(line 2"):
        ChatTemplate("\n{% for %}")


def test_no_file_is_no_template(tmp_path: Path) -> None:
    assert ChatTemplate.read(tmp_path / "chat_template.jinja") is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}é", "utf-8")
    template = ChatTemplate.read(tmp_path / "chat_template.jinja")
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "xé"


def test_a_missing_or_old_jinja2_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import jinja2

    with monkeypatch.context() as patch:
        patch.setattr(jinja2, "__version__", "3.1.4")
        with pytest.raises(ModelError, match=r"jinja2 3\.1\.4 has known holes"):
            ChatTemplate("x")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModelError, match=r"chat templates need jinja2"):
        ChatTemplate("x")
