"""Files of a job: every line is a request or a named fault, and answers that were committed stay, each once."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.talking import talking
from workbench.core.errors import WorkloadError
from workbench.jobs import requests
from workbench.jobs.answers import Answers, Faults, Journal, errors_path
from workbench.jobs.bodies import BodyReader, Kind
from workbench.jobs.llm import LLM
from workbench.jobs.requests import Fault, Line, LineReader, raw_lines, seed_of


@pytest.fixture(scope="module")
def bodies(tmp_path_factory: pytest.TempPathFactory) -> BodyReader:
    return BodyReader(LLM(talking(tmp_path_factory.mktemp("models") / "tiny-moe")))


def line(custom_id: str = "a", **more: Any) -> dict[str, Any]:
    usual = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "sort:ab="}}
    return {"custom_id": custom_id, **usual, **more}


def read(bodies: BodyReader, *entries: Any) -> list[Line | Fault]:
    reader = LineReader(bodies)
    raw = [entry if isinstance(entry, bytes) else json.dumps(entry).encode() for entry in entries]
    return [reader.read(number, each) for number, each in enumerate(raw, 1)]


# ---------------------------------------------------------------------------------------------------------- requests


def test_a_line_is_a_request_whose_seed_is_that_of_its_id(bodies: BodyReader) -> None:
    chat = {"url": "/v1/chat/completions", "body": {"messages": [{"role": "sort", "content": "ab"}]}}
    found = read(bodies, line("a"), line("b", **chat), line("c", body={"prompt": "x", "seed": 3}))
    kinds = [each.asked.kind for each in found if isinstance(each, Line)]
    assert kinds == [Kind.TEXT, Kind.CHAT, Kind.TEXT]
    seeds = [each.asked.request.sampling.seed for each in found if isinstance(each, Line)]
    assert seeds == [seed_of("a"), seed_of("b"), 3]
    assert seed_of("a") == 7299139317422481125  # it is the same in every version


def test_without_url_and_method_the_body_says_what_it_is(bodies: BodyReader) -> None:
    (text, chat) = read(
        bodies,
        {"custom_id": "a", "body": {"prompt": "x"}},
        {"custom_id": "b", "body": {"messages": [{"role": "sort", "content": "ab"}]}},
    )
    assert isinstance(text, Line)
    assert isinstance(chat, Line)
    assert (text.asked.kind, chat.asked.kind) == (Kind.TEXT, Kind.CHAT)


FAULTY: list[tuple[Any, str | None, str, str]] = [
    (b"nonsense", None, "invalid_json", "that is no JSON in UTF-8"),
    (b'{"custom_id": "a\xff"}', None, "invalid_json", "that is no JSON in UTF-8"),
    ([1], None, "invalid_json", "must be an object"),
    ({}, None, "missing_custom_id", "custom_id must be a text"),
    (line(""), None, "missing_custom_id", "custom_id must be a text"),
    (line("\ud800"), None, "missing_custom_id", "custom_id is no UTF-8"),
    (line("x" * 600), None, "missing_custom_id", "of 1 to 512 characters"),
    (line("x", seed=3), None, "invalid_value", "the key 'seed' is unknown"),
    (line("x", body=None), "x", "invalid_value", "body must be an object"),
    (line("x", method="GET"), "x", "invalid_value", "method must be POST"),
    (line("x", url="/v1/embeddings"), "x", "invalid_url", "url must be /v1/chat/completions or /v1/completions"),
    (line("x", url=[]), "x", "invalid_url", "url must be"),
    (line("x", body={"prompt": "a", "stream": True}), "x", "invalid_value", "stream cannot be true"),
    (line("x", body={"prompt": "a", "n": 2}), "x", "unsupported_value", "n=2 is not supported"),
    (line("x", body={"prompt": 3}), "x", "invalid_value", "prompt must be one text"),
]


@pytest.mark.parametrize(("entry", "custom_id", "code", "words"), FAULTY, ids=[case[3] for case in FAULTY])
def test_a_malformed_line_is_named(
    entry: Any, custom_id: str | None, code: str, words: str, bodies: BodyReader
) -> None:
    (fault,) = read(bodies, entry)
    assert isinstance(fault, Fault)
    assert (fault.number, fault.custom_id, fault.code) == (1, custom_id, code)
    assert words in fault.message


def test_of_two_lines_with_one_id_the_second_is_a_fault_that_names_both(bodies: BodyReader) -> None:
    first, _, second = read(bodies, line("a"), line("b"), line("a"))
    assert isinstance(first, Line)
    assert second == Fault(
        3, "a", "duplicate_custom_id", "lines 1 and 3 have the same custom_id 'a'; give each its own."
    )


def test_lines_are_numbered_as_an_editor_does_and_a_huge_one_is_a_fault(
    tmp_path: Path, bodies: BodyReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "LONGEST_LINE", 100)
    file = tmp_path / "requests.jsonl"
    whole = json.dumps(line("a", method="POST")).encode()
    assert len(whole) <= 100
    file.write_bytes(b"\n" + whole + b"\n  \n" + b"x" * 1000 + b"\n" + whole.replace(b'"a"', b'"b"'))
    reader = LineReader(bodies)
    found = [reader.read(*each) for each in raw_lines(file)]
    assert [(each.number, each.custom_id) for each in found] == [(2, "a"), (4, None), (5, "b")]
    assert isinstance(found[1], Fault)
    assert found[1].code == "line_too_long"


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": st.sampled_from(["a", "b", "", 3]),
        "method": st.sampled_from(["POST", "GET", None]),
        "url": st.sampled_from([*(kind.value for kind in Kind), "/", 3]),
        "body": ANY | st.dictionaries(st.sampled_from(["prompt", "messages", "stream", "n"]), ANY | st.just("x")),
    },
)


@examples(300)
@given(entries=st.lists(st.binary(max_size=30) | ENTRIES, max_size=6))
def test_lines_of_anything_are_requests_or_faults_and_no_id_is_served_twice(
    entries: list[Any], bodies: BodyReader
) -> None:
    found = read(bodies, *entries)
    served = [each.custom_id for each in found if isinstance(each, Line)]
    assert len(served) == len(set(served))
    assert [each.number for each in found] == list(range(1, len(entries) + 1))
    assert all(each.message and each.code for each in found if isinstance(each, Fault))


# ----------------------------------------------------------------------------------------------------------- answers


def body(number: int, by: str = "m-fp32-fp32") -> dict[str, Any]:
    return {"id": f"cmpl-{number}", "system_fingerprint": by, "choices": [{"text": "é\u2028\n" * number}]}


def written(path: Path, count: int = 4) -> bytes:
    with Answers(path, "m-fp32-fp32") as answers:
        answers.commit([(f"r{number}", body(number)) for number in range(2)])
        answers.commit([(f"r{number}", body(number)) for number in range(2, count)])
        assert answers.ids == {f"r{number}" for number in range(count)}
    return path.read_bytes()


def test_answers_are_in_openais_format(tmp_path: Path) -> None:
    lines = written(tmp_path / "new" / "answers.jsonl").split(b"\n")
    assert lines.pop() == b""
    found = [json.loads(line) for line in lines]
    assert [each["custom_id"] for each in found] == ["r0", "r1", "r2", "r3"]
    assert found[3]["response"] == {"status_code": 200, "request_id": "cmpl-3", "body": body(3)}
    assert set(found[3]) == {"id", "custom_id", "response", "error"}
    assert found[3]["error"] is None


def test_a_file_that_was_cut_anywhere_keeps_its_whole_lines_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    whole = written(path)
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        with Answers(path, "m-fp32-fp32") as answers:
            kept = whole[:cut].count(b"\n")
            assert answers.ids == {f"r{number}" for number in range(kept)}
            answers.commit([(f"r{number}", body(number)) for number in range(kept, 4)])
        assert path.read_bytes() == whole


def test_a_second_job_on_the_same_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with (
        Answers(path, "m-fp32-fp32"),
        pytest.raises(WorkloadError, match=r"another job writes to .*answers.jsonl"),
        Answers(path, "m-fp32-fp32"),
    ):
        pass
    with Answers(path, "m-fp32-fp32") as answers:
        assert answers.ids == set()


@pytest.mark.parametrize(
    "content",
    [b"notes", b"notes\n", b'{"custom_id": "a", "body": {}}', b'{"custom_id": "a"}\n', b"[]\n", b'{"custom_id": []}\n'],
)
def test_a_file_of_something_else_is_refused_and_stays_as_it_is(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(WorkloadError, match=r"line 1 of .* is no answer of a job; give another file"):
        Answers(path, "m-fp32-fp32")
    assert path.read_bytes() == content


def test_answers_of_another_model_or_to_other_requests_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    whole = written(path)
    with pytest.raises(WorkloadError, match="was made by m-fp32-fp32, not by m-bf16-bf16"):
        Answers(path, "m-bf16-bf16")
    with (
        Answers(path, "m-fp32-fp32") as answers,
        pytest.raises(WorkloadError, match=r"has the answer to 'r3', for which .* does not ask"),
    ):
        answers.check_asked({"r0", "r1", "r2"}, Path("requests.jsonl"))
    path.write_bytes(whole + whole)
    with pytest.raises(WorkloadError, match=r"line 5 of .* is there twice"):
        Answers(path, "m-fp32-fp32")


def test_faults_stand_in_a_file_of_their_own_which_each_start_writes_anew(tmp_path: Path) -> None:
    path = errors_path(tmp_path / "answers.jsonl")
    assert path.name == "answers.errors.jsonl"
    for _ in range(2):
        faults = Faults(path)
        assert not path.exists()
        faults.add(Fault(3, "a", "invalid_value", "no."))
        faults.add(Fault(5, None, "invalid_json", "no."))
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert faults.count == len(found) == 2
    assert found[0]["error"] == {"code": "invalid_value", "message": "no.", "line": 3}
    assert [(each["custom_id"], each["response"]) for each in found] == [("a", None), (None, None)]


@pytest.fixture
def journals(tmp_path: Path) -> Path:
    """Two starts that died: one while it began to write, another that served b alone."""
    path = tmp_path / "answers.begun"
    first = Journal(path)
    for custom_id in "abc":
        first.begin(custom_id, alone=False)
    path.write_bytes(path.read_bytes()[:-9])
    second = Journal(path)
    second.begin("a", alone=False)
    second.begin("b", alone=True)
    return path


def test_a_journal_knows_what_was_begun_before(journals: Path, tmp_path: Path) -> None:
    third = Journal(journals)
    assert third.begun == {"a": 2, "b": 1}
    assert third.alone == {"b": 1}
    other = Journal(tmp_path / "other", [journals])
    other.begin("z", alone=False)
    assert other.begun == third.begun
    third.close(finished=False)
    assert journals.exists()
    Journal(journals).close(finished=True)
    assert not journals.exists()
