"""Bodies of requests in the form of OpenAI's API: what is asked for is what the engine gets, or is refused by name."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.examples import examples
from tests.talking import SHIPPED, talking
from workbench.core.errors import RequestError
from workbench.core.result import TokenLogprobs
from workbench.engine import End
from workbench.jobs.bodies import Asked, BodyReader, Kind, parse_object
from workbench.jobs.completions import AnswerWriter
from workbench.jobs.llm import LLM


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(talking(tmp_path_factory.mktemp("models") / "tiny-moe"))


@pytest.fixture(scope="module")
def reader(llm: LLM) -> BodyReader:
    return BodyReader(llm, max_tokens=40)


CONVERSATION = {"messages": [{"role": "sort", "content": "plmku"}]}


def test_a_conversation_becomes_a_prompt_by_the_template(llm: LLM, reader: BodyReader) -> None:
    asked = reader.read(Kind.CHAT, CONVERSATION | {"max_completion_tokens": 5}, seed=7)
    assert asked == Asked(Kind.CHAT, wb.Request(llm.tokenizer.encode("sort:plmku="), 5, wb.Sampling(seed=7)))
    parts = [{"type": "text", "text": "pl"}, {"type": "text", "text": "mku"}]
    in_parts = reader.read(Kind.CHAT, {"messages": [{"role": "sort", "content": parts}]})
    assert in_parts.request.prompt == asked.request.prompt


@pytest.mark.parametrize("prompt", ["sort:ab=", ["sort:ab="], "ids", "ids of one"])
def test_a_prompt_is_a_text_or_token_ids(prompt: Any, llm: LLM, reader: BodyReader) -> None:
    tokens = llm.tokenizer.encode("sort:ab=", special=True)
    forms = {"ids": list(tokens), "ids of one": [list(tokens)]}
    given_ = forms.get(prompt, prompt) if isinstance(prompt, str) else prompt
    asked = reader.read(Kind.TEXT, {"prompt": given_})
    assert (asked.request.prompt, asked.request.output_len) == (tokens, 40)


def test_every_setting_arrives(reader: BodyReader) -> None:
    settings = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1}
    body = settings | {"presence_penalty": 0.2, "seed": -1, "stop": "x", "stop_token_ids": [3], "logprobs": 4}
    asked = reader.read(Kind.TEXT, {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}} | body)
    how = asked.request.sampling
    rest = {"presence_penalty": 0.2, "seed": 2**64 - 1, "stop": ("x",), "stop_token_ids": (3,), "logprobs": 4}
    assert how == wb.Sampling(**settings, **rest)
    assert (asked.stream, asked.usage) == (True, True)
    chat = reader.read(Kind.CHAT, CONVERSATION | {"logprobs": True, "top_logprobs": 2, "stop": ["a", "b"]})
    assert (chat.request.sampling.logprobs, chat.request.sampling.stop) == (2, ("a", "b"))
    assert reader.read(Kind.CHAT, CONVERSATION | {"logprobs": True}).request.sampling.logprobs == 0
    assert reader.read(Kind.CHAT, CONVERSATION | {"logprobs": False}).request.sampling.logprobs is None


def test_what_the_checkpoint_says_holds_unless_the_body_says_otherwise(tmp_path: Path) -> None:
    folder = talking(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"top_k": 3, "temperature": 0.7, "eos_token_id": [1]}')
    reader = BodyReader(LLM(folder))
    how = reader.read(Kind.TEXT, {"prompt": "a"}).request.sampling
    assert (how.top_k, how.temperature, how.stop_token_ids) == (3, 0.0, (1,))
    how = reader.read(
        Kind.TEXT, {"prompt": "a", "top_k": 9, "ignore_eos": True, "stop_token_ids": [2]}
    ).request.sampling
    assert (how.top_k, how.stop_token_ids) == (9, (2,))


def test_an_answer_of_unsaid_length_is_as_long_as_there_is_room(llm: LLM) -> None:
    reader = BodyReader(llm, max_tokens=40, longest=20)
    assert reader.read(Kind.TEXT, {"prompt": [1] * 8}).request.output_len == 12
    assert reader.read(Kind.TEXT, {"prompt": "a" * 30}).request.output_len == 1
    assert reader.read(Kind.TEXT, {"prompt": "a", "max_tokens": 90}).request.output_len == 90


def test_what_asks_for_nothing_is_taken(reader: BodyReader) -> None:
    usual = {"n": 1, "frequency_penalty": 0, "logit_bias": {}, "tools": [], "user": "me", "metadata": {"a": 1}}
    usual |= {"response_format": {"type": "text"}, "model": "tiny-moe", "top_p": None, "seed": None}
    assert reader.read(Kind.CHAT, CONVERSATION | usual) == reader.read(Kind.CHAT, CONVERSATION)


REFUSED: list[tuple[Kind, dict[str, Any], str, str | None]] = [
    (Kind.TEXT, {}, "prompt must be one text", "prompt"),
    (Kind.TEXT, {"prompt": ["a", "b"]}, "several requests for several prompts", "prompt"),
    (Kind.TEXT, {"prompt": ""}, "at least one token", "prompt"),
    (Kind.TEXT, {"prompt": [10**6]}, "knows 0 to", "prompt"),
    (Kind.TEXT, {"prompt": [-1]}, "non-negative", "prompt"),
    (Kind.TEXT, {"prompt": "\ud800"}, "no UTF-8", "prompt"),
    (Kind.TEXT, {"prompt": "a", "n": 2}, "n=2 is not supported; leave it out, or give 1", "n"),
    (Kind.TEXT, {"prompt": "a", "n": True}, "n=True is not supported", "n"),
    (Kind.TEXT, {"prompt": "a", "echo": True}, "echo=True is not supported", "echo"),
    (Kind.TEXT, {"prompt": "a", "temprature": 1}, "'temprature' is unknown", "'temprature'"),
    (Kind.TEXT, {"prompt": "a", "messages": []}, "'messages' is unknown", "'messages'"),
    (Kind.TEXT, {"prompt": "a", "model": "gpt"}, "no model 'gpt' here; give 'tiny-moe'", "model"),
    (Kind.TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens must be a whole number", "max_tokens"),
    (Kind.TEXT, {"prompt": "a", "max_tokens": "9"}, "max_tokens must be a whole number", "max_tokens"),
    (Kind.TEXT, {"prompt": "a", "max_tokens": 10**30}, "max_tokens must be a whole number", "max_tokens"),
    (Kind.TEXT, {"prompt": "a", "temperature": -1}, "temperature must be 0", "temperature"),
    (Kind.TEXT, {"prompt": "a", "temperature": True}, "temperature must be a number", "temperature"),
    (Kind.TEXT, {"prompt": "a", "temperature": float("nan")}, "temperature must be 0", "temperature"),
    (Kind.TEXT, {"prompt": "a", "top_p": 0}, "top_p must lie in", "top_p"),
    (Kind.TEXT, {"prompt": "a", "seed": 1.5}, "seed must be", "seed"),
    (Kind.TEXT, {"prompt": "a", "stop": [""]}, "stop must be texts", "stop"),
    (Kind.TEXT, {"prompt": "a", "stop": ["x"] * 99}, "at most 16 texts", "stop"),
    (Kind.TEXT, {"prompt": "a", "stop_token_ids": ["x"]}, "stop_token_ids must be token ids", "stop_token_ids"),
    (Kind.TEXT, {"prompt": "a", "stop_token_ids": [10**6]}, "knows 0 to", "stop_token_ids"),
    (Kind.TEXT, {"prompt": "a", "logprobs": 99}, "from 0 to 20", "logprobs"),
    (Kind.TEXT, {"prompt": "a", "logprobs": True}, "from 0 to 20", "logprobs"),
    (Kind.TEXT, {"prompt": "a", "stream": 1}, "stream must be true or false", "stream"),
    (Kind.CHAT, {}, "messages must be a list", "messages"),
    (Kind.CHAT, {"messages": [{"content": "a"}]}, "a message must be such as", "messages"),
    (Kind.CHAT, {"messages": [{"role": "sort"}]}, "content of a message must be a text", "messages"),
    (Kind.CHAT, {"messages": [{"role": "sort", "content": [{"image_url": "x"}]}]}, "parts that are texts", "messages"),
    (Kind.CHAT, {"messages": [{"role": "user", "content": "a"}]}, "refuses the conversation", "messages"),
    (Kind.CHAT, CONVERSATION | {"top_logprobs": 2}, "needs logprobs to be true", "top_logprobs"),
    (
        Kind.CHAT,
        CONVERSATION | {"max_tokens": 1, "max_completion_tokens": 1},
        "give one of them",
        "max_completion_tokens",
    ),
    (Kind.CHAT, CONVERSATION | {"tools": [{"type": "function"}]}, "is not supported", "tools"),
]


@pytest.mark.parametrize(("kind", "body", "words", "param"), REFUSED, ids=[str(case[2]) for case in REFUSED])
def test_what_cannot_be_given_is_refused_with_its_key(
    kind: Kind, body: dict[str, Any], words: str, param: str | None, reader: BodyReader
) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        reader.read(kind, body)
    assert refused.value.param == param
    assert refused.value.status == (404 if param == "model" else 400)


def test_a_model_without_a_template_has_no_chat() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        BodyReader(LLM(SHIPPED)).read(Kind.CHAT, CONVERSATION)


KEYS = [*CONVERSATION, "prompt", "n", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed"]
KEYS += ["max_tokens", "stop", "stop_token_ids", "logprobs", "top_logprobs", "model", "logit_bias", "ignore_eos", "x"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "text"]), inner),
    max_leaves=8,
)
LIKELY = st.sampled_from(["sort:ab=", [1, 2], 1, True, 0.5, [{"role": "sort", "content": "ab"}], ["x"], {}])


@examples(400)
@given(kind=st.sampled_from(Kind), body=st.dictionaries(st.sampled_from(KEYS), VALUES | LIKELY))
def test_a_body_of_anything_is_a_request_or_a_refusal(kind: Kind, body: dict[str, Any], reader: BodyReader) -> None:
    with suppress(RequestError):
        wb.Workload.of([reader.read(kind, body).request])


@examples(200)
@given(st.binary() | VALUES.map(lambda value: json.dumps(value).encode()))
def test_bytes_are_an_object_or_a_refusal(raw: bytes) -> None:
    with suppress(RequestError):
        assert isinstance(parse_object(raw), dict)


def test_deeply_nested_json_is_refused() -> None:
    with pytest.raises(RequestError, match=r"nested too deeply|no JSON"):
        parse_object(b"[" * 200_000)


# ----------------------------------------------------------------------------------------------------------- answers


def test_an_answer_is_what_the_tokens_spell(llm: LLM, reader: BodyReader) -> None:
    tokens = llm.tokenizer.encode("klmpu\n")
    asked = reader.read(Kind.CHAT, CONVERSATION | {"stop_token_ids": [tokens[-1]]})
    body = AnswerWriter(llm).answer(asked, "7", 3, tokens, (), End.STOP)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "klmpu", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13}
    assert (body["id"], body["object"], body["created"]) == ("chatcmpl-7", "chat.completion", 3)
    cut = reader.read(Kind.TEXT, {"prompt": "sort:plmku=", "stop": "pu"})
    (choice,) = AnswerWriter(llm).answer(cut, "7", 3, tokens[:5], (), End.STOP)["choices"]
    assert choice["text"] == "klm"


def test_log_probabilities_stand_beside_the_tokens(llm: LLM, reader: BodyReader) -> None:
    tokens = llm.tokenizer.encode("klm")
    found = [TokenLogprobs(-0.5 - n, ((token, -0.5 - n), (tokens[0], -9.0))) for n, token in enumerate(tokens)]
    writer = AnswerWriter(llm)
    text = reader.read(Kind.TEXT, {"prompt": "a", "logprobs": 2})
    logprobs = writer.answer(text, "7", 3, tokens, found, End.LENGTH)["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["text_offset"]) == (["k", "l", "m"], [0, 1, 2])
    assert logprobs["token_logprobs"] == [-0.5, -1.5, -2.5]
    assert logprobs["top_logprobs"][1] == {"l": -1.5, "k": -9.0}
    chat = reader.read(Kind.CHAT, CONVERSATION | {"logprobs": True, "top_logprobs": 2})
    content = writer.answer(chat, "7", 3, tokens, found, End.LENGTH)["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content] == ["k", "l", "m"]
    best = [{"token": "m", "logprob": -2.5, "bytes": [109]}, {"token": "k", "logprob": -9.0, "bytes": [107]}]
    assert content[2] == best[0] | {"top_logprobs": best}
