"""Conversations as text, by the chat template of a checkpoint: a program in Jinja, which runs in Jinja's sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from reprlib import repr as short
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workbench.core.errors import CheckpointError, WorkloadError
from workbench.core.records import is_file, read_json, reason
from workbench.models import ModelConfig

Message = Mapping[str, Any]
"""One message: its ``role``, such as "user", and its ``content``."""

_FILE = "chat_template.jinja"
_CONFIG = "tokenizer_config.json"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """The chat template of a checkpoint, as transformers renders it.

    Parameters
    ----------
    name : str
        Name of the checkpoint, for messages.
    source : str
        The template.
    special : mapping of str to str
        Texts of special tokens, by the names by which a template knows them, such as ``bos_token``.

    Raises
    ------
    CheckpointError
        If it is no template.
    """

    def __init__(self, name: str, source: str, special: Mapping[str, str]) -> None:
        self._name = name
        self._special = special
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(
                f"the chat template of {name!r} cannot be read ({reason(error)}); restore it from where the model came."
            ) from error

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a conversation, up to where the model's answer begins, special tokens included.

        Raises
        ------
        WorkloadError
            If a message has no role, or the template refuses the conversation.
        """
        if not messages or not all(map(_is_message, messages)):
            raise WorkloadError(
                "a conversation must be messages such as {'role': 'user', 'content': 'Hello'}, not "
                f"{short(messages)}; give a list of them."
            )
        known = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render({**self._special, **known})
        except Exception as error:  # a template is a program of others
            raise WorkloadError(
                f"the chat template of {self._name!r} refuses the conversation {short(messages)} ({reason(error)}); "
                "give the roles and contents that the model was trained on."
            ) from error


def load_chat_template(model: ModelConfig | str | Path) -> ChatTemplate:
    """The chat template of a checkpoint: its ``chat_template.jinja``, or that in its ``tokenizer_config.json``.

    Parameters
    ----------
    model : ModelConfig or str or Path
        A checkpoint, or its folder.

    Raises
    ------
    CheckpointError
        If it has none, or a file is damaged.
    """
    folder = model.path if isinstance(model, ModelConfig) else Path(model)
    if folder is None:
        raise CheckpointError(f"model {short(str(model))} is no checkpoint with files; give wb.checkpoint(folder).")
    config = _config(folder / _CONFIG)
    source = _source(folder, config)
    if source is None:
        raise CheckpointError(
            f"checkpoint {folder.name!r} has no chat template, neither {_FILE} nor a chat_template in {_CONFIG}; give "
            "prompts to generate."
        )
    return ChatTemplate(folder.name, source, _special(config))


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)


def _config(file: Path) -> dict[str, Any]:
    try:
        found = read_json(file) if is_file(file) else {}
    except ValueError as error:
        raise CheckpointError(f"{error}; restore it from where the model came.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is no object; restore it from where the model came.")
    return found


def _source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The text of the template; of several named ones the default."""
    if is_file(folder / _FILE):
        try:
            return (folder / _FILE).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{folder / _FILE} cannot be read ({reason(error)}); fetch it again.") from error
    found = config.get("chat_template")
    if isinstance(found, list):
        named = (each for each in found if isinstance(each, dict) and each.get("name") == "default")
        found = next(named, {}).get("template")
    return found if isinstance(found, str) else None


def _special(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of special tokens, which are texts or objects that contain one."""
    found = {name: config.get(name) for name in _SPECIAL}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


class _Generation(Extension):
    """The tag that marks an assistant's words for training: its body is text like any other."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment for which templates are written: that of transformers' `apply_chat_template`."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON without the escapes of HTML that Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
