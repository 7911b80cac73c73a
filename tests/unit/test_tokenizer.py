"""Text and token ids: the tokenizer of a checkpoint, and bytes where it has none."""

import json
import os
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core.catalogue import data_path
from workbench.core.errors import CheckpointError, WorkloadError
from workbench.models import checkpoint, models
from workbench.workload import Workload
from workbench.workload.exercises import KINDS, exercises
from workbench.workload.tokenizer import BYTES, load_tokenizer

TINY = data_path("models/tiny-moe")
SOLVED = [exercise.line for exercise in islice(exercises(), 300)]


@pytest.fixture(scope="module")
def tiny():
    return load_tokenizer(TINY)


@given(text=st.text())
def test_bytes_come_back_as_text(text):
    tokens = BYTES.encode(text)
    assert bytes(tokens) == text.encode()
    assert BYTES.decode(tokens) == text


def test_what_is_no_byte_is_shown_as_such():
    assert BYTES.decode((97, 300, -1, 0xFF)) == "a\ufffd\ufffd\ufffd"


def test_a_model_without_tokenizer_reads_bytes(tmp_path):
    assert load_tokenizer(tmp_path) is BYTES
    assert load_tokenizer(models["mixtral-8x7b"]) is BYTES


def test_exercises_come_back_as_text(tiny):
    for line in SOLVED:
        assert tiny.decode(tiny.encode(line)) == line


def test_a_kind_is_one_token_and_so_is_each_character_after_it(tiny):
    for kind in KINDS:
        assert len(tiny.encode(f"{kind}:ab12=ba\n")) == 9
    assert len(tiny.encode("addmax")) == 6


def test_its_ids_are_rows_of_the_embedding(tiny):
    size = checkpoint(TINY).vocab_size
    assert size <= 128
    assert all(0 <= token < size for line in SOLVED for token in tiny.encode(line))


def test_a_model_and_its_folder_have_one_tokenizer(tiny):
    assert load_tokenizer(checkpoint(TINY)).encode(SOLVED[0]) == tiny.encode(SOLVED[0])


def test_transformers_reads_it_alike(tiny):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(TINY / "tokenizer.json"))
    for line in SOLVED[:40]:
        assert tuple(theirs.encode(line, add_special_tokens=False)) == tiny.encode(line)
        assert theirs.decode(tiny.encode(line)) == line


def test_text_without_a_token_is_refused(tiny):
    with pytest.raises(WorkloadError, match=r"'add:3×4=' has '×', the tokenizer of 'tiny-moe' has no token for it"):
        tiny.encode("add:3×4=")


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no valid tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_tokenizer_of_another_kind_is_not_taken_for_bytes(name, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=f"has {name} and no tokenizer.json; make one by transformers"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_has_changed_is_read_again(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text((TINY / "tokenizer.json").read_text())
    first = load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path) is first
    file.write_text("{}")
    os.utime(file, ns=(1, 1))
    with pytest.raises(CheckpointError, match="no valid tokenizer"):
        load_tokenizer(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere' is no folder"):
        load_tokenizer(tmp_path / "nowhere")


def test_workloads_are_read_with_it(tiny, tmp_path):
    text, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("copy:abc=\nsort:cab=\n")
    lines.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in ("copy:abc=", "sort:cab=")))
    wanted = [tiny.encode("copy:abc="), tiny.encode("sort:cab=")]
    for workload in (
        Workload.from_text(text, requests=2, output_len=4, tokenizer=tiny),
        Workload.from_jsonl(lines, tokenizer=tiny),
    ):
        assert [request.prompt for request in workload.requests] == wanted


def test_a_line_that_cannot_be_encoded_is_named(tiny, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "copy:abc="}\n{"prompt": "COPY"}\n')
    with pytest.raises(WorkloadError, match=r"prompts\.jsonl:2: text 'COPY' has 'C'"):
        Workload.from_jsonl(path, tokenizer=tiny)


@pytest.mark.parametrize("token", [-1, 2**32, 2**64])
def test_an_id_that_no_tokenizer_has_is_named(token):
    tokenizer = load_tokenizer(data_path("models/tiny-moe"))
    with pytest.raises(WorkloadError, match=f"has no token {token}; give ids below"):
        tokenizer.decode([1, token])
