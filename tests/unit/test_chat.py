"""Chat templates, as transformers renders them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.core.errors import CheckpointError, WorkloadError
from workbench.models import models
from workbench.workload.chat import load_chat_template

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- for message in messages if message.role != 'system' %}
    {%- if loop.index0 % 2 != (message.role == 'assistant') | int %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {{- '<|' ~ message.role ~ '|>' ~ message.content | trim ~ eos_token }}
{%- endfor %}
"""
MARKED = """{% for message in messages %}
  {% if message.role == 'assistant' %}
    {% generation %}{{ message.content }}{% endgeneration %}
  {% else %}
    {{ message | tojson }}
  {% endif %}
  {% if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}
{% set ns = namespace(count=0) %}{% set ns.count = ns.count + 1 %}{{ ns.count }}{{ unk_token }}
{% if tools %}tools{% endif %}
"""
TALK = [
    {"role": "user", "content": " What is <b>2 & 3</b>? ü"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "and 4 more?\n"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(template: object = None, *, apart: bool = False, **config: object) -> Path:
        if apart:
            (tmp_path / "chat_template.jinja").write_text(str(template), encoding="utf-8")
        own = {} if apart or template is None else {"chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(SPECIAL | own | config))
        return tmp_path

    return make


def theirs(template: str, messages: list[dict[str, str]]) -> str:
    """The text that transformers makes of a conversation."""
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (text,), _ = render_jinja_template([messages], None, None, template, add_generation_prompt=True, **special)
    return str(text)


@pytest.mark.parametrize("apart", [False, True], ids=["in the configuration", "in its own file"])
@pytest.mark.parametrize("template", [CHATML, LLAMA, MARKED], ids=["chatml", "llama", "marked"])
def test_a_conversation_is_rendered_as_by_transformers(template: str, apart: bool, write: Write) -> None:
    pytest.importorskip("transformers")
    found = load_chat_template(write(template, apart=apart)).render(TALK)
    assert found == theirs(template, TALK)
    assert TALK[-1]["content"].strip() in found


def test_of_several_templates_the_default_is_taken(write: Write) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}plain"}]
    assert load_chat_template(write(named)).render(TALK) == "<s>plain"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "a conversation must be messages"),
        ("Hello", "a conversation must be messages"),
        ([{"content": "Hello"}], "a conversation must be messages"),
        ([{"role": "assistant", "content": "Hello"}], "refuses the conversation .*roles must alternate"),
        ([{"role": "user"}], "refuses the conversation"),
    ],
)
def test_a_conversation_that_the_template_does_not_take_is_named(messages: Any, words: str, write: Write) -> None:
    template = load_chat_template(write(LLAMA if messages != [{"role": "user"}] else CHATML))
    with pytest.raises(WorkloadError, match=words):
        template.render(messages)


@pytest.mark.parametrize("reach", ["messages.__class__.__mro__", "''.__class__", "messages.append(1)"])
def test_a_template_reaches_nothing_but_its_words(reach: str, write: Write) -> None:
    talk = list(TALK)
    template = load_chat_template(write("{{ " + reach + " }}"))
    try:
        assert template.render(talk) == ""
    except WorkloadError as error:
        assert "SecurityError" in str(error)  # noqa: PT017
    assert talk == TALK


def test_a_missing_or_damaged_template_is_named(write: Write, tmp_path: Path) -> None:
    for folder in (tmp_path, write(), write([{"name": "rag", "template": "x"}])):
        with pytest.raises(CheckpointError, match="has no chat template"):
            load_chat_template(folder)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_chat_template(write("{% if %}"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="restore it"):
        load_chat_template(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint with files"):
        load_chat_template(models["mixtral-8x7b"])
