"""Bodies of requests in the form of OpenAI's API, checked: each becomes a `Request`."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Any

from workbench.core.errors import CheckpointError, RequestError, WorkloadError
from workbench.core.units import is_number, is_whole
from workbench.jobs.llm import LLM, MAX_TOKENS
from workbench.workload import Request, Sampling


class Kind(enum.Enum):
    """Kind of a request; the values are the paths of the API."""

    CHAT = "/v1/chat/completions"
    TEXT = "/v1/completions"


_MOST_STOPS = 16
_MOST_LOGPROBS = 20
_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")
_OWN = frozenset(
    (
        *_NUMBERS,
        *("model", "max_tokens", "seed", "stop", "stop_token_ids", "ignore_eos"),
        *("logprobs", "stream", "stream_options"),
    )
)
_OF_KIND = {Kind.TEXT: {"prompt"}, Kind.CHAT: {"messages", "max_completion_tokens", "top_logprobs"}}
_IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier"}
"""Keys that say who asks, and change no text."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (False, True),
    "functions": ([],),
    "modalities": (["text"],),
    "store": (False,),
}
"""Keys of OpenAI's API that only these values are taken of: they ask for nothing."""


@dataclass(frozen=True)
class Asked:
    """A checked request: what the model is given, and how the answer is written.

    Attributes
    ----------
    kind : Kind
    request : Request
    stream, usage : bool
        Send the text as it comes, and the counts of tokens at the end of it.
    """

    kind: Kind
    request: Request
    stream: bool = False
    usage: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and, at most, of the answer."""
        return len(self.request.prompt) + self.request.output_len

    def too_long(self, most: int) -> RequestError:
        """The error of a request that has more tokens than there is room for."""
        return RequestError(
            f"a prompt of {len(self.request.prompt)} tokens and an answer of {self.request.output_len} are too long, "
            f"there is room for {most} in all; shorten the prompt, or give a smaller max_tokens.",
            "max_tokens",
            code="context_length_exceeded",
        )


def parse_object(raw: bytes | str) -> dict[str, Any]:
    """The object of a text in JSON.

    Raises
    ------
    RequestError
        If it is no object of JSON in UTF-8.
    """
    try:
        found = json.loads(raw.decode("utf-8") if isinstance(raw, bytes) else raw)
    except RecursionError:
        raise RequestError("the JSON is nested too deeply; write one flat object.", code="invalid_json") from None
    except ValueError as error:
        raise RequestError(f"that is no JSON in UTF-8 ({error}); write one object.", code="invalid_json") from None
    if not isinstance(found, dict):
        raise RequestError(f"the JSON must be an object, not {short(found)}.", code="invalid_json")
    return found


class BodyReader:
    """Checks bodies of requests to one model.

    Parameters
    ----------
    llm : LLM
    max_tokens : int
        Most tokens of an answer, where the body says nothing; fewer where the prompt leaves less room.
    longest : int, optional
        Most tokens of prompt and answer together; by default as many as the model takes.

    Notes
    -----
    Texts are greedy unless a temperature is given, as those of `LLM` are; OpenAI's default is 1. Keys beyond OpenAI's
    are those of `Sampling`, and ``ignore_eos``. A key that asks for something else is refused, so that nothing is left
    out silently.
    """

    def __init__(self, llm: LLM, *, max_tokens: int = MAX_TOKENS, longest: int | None = None) -> None:
        self._llm = llm
        self._max_tokens = max_tokens
        self._longest = longest or llm.longest

    def read(self, kind: Kind, body: Mapping[str, Any], *, seed: int = 0) -> Asked:
        """The request that a body asks for; `seed` is its seed unless it gives one.

        Raises
        ------
        RequestError
            If it is malformed, or asks for what this model or this program has not.
        """
        given = {key: value for key, value in body.items() if value is not None}
        self._check_keys(kind, given)
        self._check_model(given)
        sampling = self._sampling(kind, given, seed)
        prompt = self._conversation(given) if kind is Kind.CHAT else self._prompt(given)
        most = self._most(given, self._longest - len(prompt))
        try:
            request = Request(prompt, most, sampling)
        except WorkloadError as error:
            raise RequestError(str(error), "messages" if kind is Kind.CHAT else "prompt") from None
        self._check_tokens(request)
        options = _typed(given, "stream_options", Mapping) or {}
        return Asked(kind, request, bool(_typed(given, "stream", bool)), options.get("include_usage") is True)

    # ------------------------------------------------------------------------------------------------------- the keys

    def _check_keys(self, kind: Kind, given: Mapping[str, Any]) -> None:
        for key, value in given.items():
            if key in _IGNORED or key in _OWN or key in _OF_KIND[kind]:
                continue
            if key not in _NEUTRAL:
                raise RequestError(
                    f"the key {short(key)} is unknown to {kind.value}; remove it.", short(key), code="unknown_parameter"
                )
            if not any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL[key]):
                usual = json.dumps(_NEUTRAL[key][0])
                raise RequestError(
                    f"{key}={short(value)} is not supported; leave it out, or give {usual}.",
                    key,
                    code="unsupported_value",
                )

    def _check_model(self, given: Mapping[str, Any]) -> None:
        name = _typed(given, "model", str)
        if name is not None and name != self._llm.model.name:
            raise RequestError(
                f"there is no model {short(name)} here; give {self._llm.model.name!r}, or leave model out.",
                "model",
                code="model_not_found",
                status=404,
            )

    def _most(self, given: Mapping[str, Any], room: int) -> int:
        names = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
        if len(names) > 1:
            raise RequestError("max_tokens and max_completion_tokens are the same; give one of them.", names[0])
        most = given[names[0]] if names else max(1, min(self._max_tokens, room))
        if not (is_whole(most) and 1 <= most < 2**31):
            raise RequestError(f"{names[0]} must be a whole number of tokens from 1 on, not {short(most)}.", names[0])
        return int(most)

    def _sampling(self, kind: Kind, given: Mapping[str, Any], seed: int) -> Sampling:
        asked = {key: given[key] for key in _NUMBERS if key in given}
        for key, value in asked.items():
            if not is_number(value):
                raise RequestError(f"{key} must be a number, not {short(value)}.", key)
        if "seed" in given:
            if not (is_whole(given["seed"]) and -(2**63) <= given["seed"] < 2**64):
                raise RequestError(f"seed must be a whole number of 64 bits, not {short(given['seed'])}.", "seed")
            seed = int(given["seed"]) % 2**64
        stops = _typed(given, "stop_token_ids", list) or []
        texts = given.get("stop", [])
        texts = [texts] if isinstance(texts, str) else texts
        if isinstance(texts, list) and len(texts) > _MOST_STOPS:
            raise RequestError(f"stop must be at most {_MOST_STOPS} texts, not {len(texts)}.", "stop")
        ends = () if _typed(given, "ignore_eos", bool) else self._llm.eos
        logprobs = self._logprobs(kind, given)
        whole = {**self._llm.defaults, **asked, "seed": seed, "stop": texts, "stop_token_ids": stops}
        try:
            how = Sampling(**whole, logprobs=logprobs)
        except WorkloadError as error:
            raise RequestError(str(error), str(error).partition(" ")[0]) from None  # its first word is the key
        return replace(how, stop_token_ids=(*how.stop_token_ids, *ends))

    def _logprobs(self, kind: Kind, given: Mapping[str, Any]) -> int | None:
        if kind is Kind.TEXT:
            best = given.get("logprobs")
            name = "logprobs"
        else:
            wanted = _typed(given, "logprobs", bool)
            name = "top_logprobs"
            if name in given and not wanted:
                raise RequestError("top_logprobs needs logprobs to be true; give both.", name)
            best = given.get(name, 0) if wanted else None
        if best is not None and not (is_whole(best) and 0 <= best <= _MOST_LOGPROBS):
            raise RequestError(
                f"{name} must be a number of tokens from 0 to {_MOST_LOGPROBS}, not {short(best)}.", name
            )
        return best

    # ----------------------------------------------------------------------------------------------------- the prompt

    def _prompt(self, given: Mapping[str, Any]) -> tuple[int, ...]:
        prompt = given.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, list) and all(map(is_whole, prompt)):
            return tuple(prompt)
        if not isinstance(prompt, str):
            raise RequestError(
                f"prompt must be one text, or the token ids of one, not {short(prompt)}; send several requests for "
                "several prompts.",
                "prompt",
            )
        return self._encode(prompt, "prompt", special=True)

    def _conversation(self, given: Mapping[str, Any]) -> tuple[int, ...]:
        messages = given.get("messages")
        if not (isinstance(messages, list) and messages):
            raise RequestError(f"messages must be a list of at least one message, not {short(messages)}.", "messages")
        try:
            text = self._llm.chat_template.render([_plain(message) for message in messages])
        except (CheckpointError, WorkloadError) as error:
            raise _as_request_error(error, "messages") from None
        return self._encode(text, "messages")

    def _encode(self, text: str, param: str, *, special: bool = False) -> tuple[int, ...]:
        if not is_utf8(text):
            raise RequestError(f"{param} has a text that is no UTF-8; correct it.", param)
        try:
            return self._llm.tokenizer.encode(text, special=special)
        except WorkloadError as error:
            raise RequestError(str(error), param) from None

    def _check_tokens(self, request: Request) -> None:
        size = self._llm.model.vocab_size
        for param, tokens in (("prompt", request.prompt), ("stop_token_ids", request.sampling.stop_token_ids)):
            strange = [token for token in tokens if token >= size]
            if strange:
                raise RequestError(
                    f"{param} has the token id {strange[0]}, and {self._llm.model.name!r} knows 0 to {size - 1}.", param
                )


def is_utf8(text: str) -> bool:
    """True if a text can be written in UTF-8: JSON may contain halves of characters."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _typed(given: Mapping[str, Any], key: str, kind: type) -> Any:
    """The value of a key, None if it is not there."""
    value = given.get(key)
    if value is not None and not isinstance(value, kind):
        name = {"bool": "true or false", "str": "a text", "list": "a list"}.get(kind.__name__, "an object")
        raise RequestError(f"{key} must be {name}, not {short(value)}.", key)
    return value


def _plain(message: object) -> dict[str, Any]:
    """A message whose content is a text; parts that are texts become one."""
    if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
        raise RequestError(
            f"a message must be such as {{'role': 'user', 'content': 'Hello'}}, not {short(message)}.", "messages"
        )
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise RequestError(f"only parts that are texts can be read, not {short(content)}.", "messages")
        content = "".join(map(str, texts))
    if not isinstance(content, str):
        raise RequestError(f"the content of a message must be a text, not {short(content)}.", "messages")
    return {**message, "content": content}


def _as_request_error(error: Exception, param: str) -> RequestError:
    return error if isinstance(error, RequestError) else RequestError(str(error), param)
