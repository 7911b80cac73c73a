"""`LLM`: texts in, texts out, whatever the places of model and cache."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers

import workbench as wb
from workbench.core.errors import CapacityError, CheckpointError, WorkloadError
from workbench.engine import llm as module
from workbench.stages import Place

SHIPPED = wb.data_path("models/tiny-moe")
TEXTS = ["copy:iwfbzx=", "reverse:agjyxd=", "sort:plmku=", "copy:hello=", "reverse:abcdefgh="]
ANSWERS = ["iwfbzx", "dxyjga", "klmpu", "hello", "hgfedcba"]


@pytest.fixture(scope="module")
def llm() -> wb.LLM:
    return wb.LLM(SHIPPED)


@pytest.fixture
def line_end(llm) -> tuple[int, ...]:
    return llm.tokenizer.encode("\n")


def generated(llm: wb.LLM, line_end: tuple[int, ...]) -> list[str]:
    return llm.generate(TEXTS, max_tokens=12, stop_token_ids=line_end)


def test_each_text_follows_its_prompt_and_ends_before_its_stop_token(llm, line_end):
    assert generated(llm, line_end) == ANSWERS
    went_on = llm.generate(TEXTS[:1], max_tokens=12)[0]
    assert went_on.startswith(f"{ANSWERS[0]}\n")
    assert len(llm.tokenizer.encode(went_on)) == 12


def test_token_ids_are_prompts_too(llm, line_end):
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    assert llm.generate(ids, max_tokens=12, stop_token_ids=line_end) == ANSWERS
    assert llm.generate([]) == []


def test_the_same_seed_gives_the_same_text_and_another_seed_another(llm):
    def draw(seed):
        return llm.generate(TEXTS, max_tokens=16, temperature=3.0, seed=seed)

    assert draw(1) == draw(1) != draw(2)


def test_where_the_gpu_is_too_small_the_model_is_on_the_cpu_and_answers_alike(llm, line_end, monkeypatch):
    ids = [wb.Request(llm.tokenizer.encode(text), 12) for text in TEXTS]
    workload = wb.Workload.of(ids)
    assert {stage.device for stage in llm.scenario(workload).pipeline.stages} == {Place.GPU}
    small = wb.Machine.local().limit(gpu_memory="1.2MB")
    monkeypatch.setattr(module.Machine, "local", lambda: small)
    assert {stage.device for stage in llm.scenario(workload).pipeline.stages} == {Place.CPU}
    assert generated(llm, line_end) == ANSWERS
    tiny = wb.Machine.local().limit(gpu_memory="1kB")
    monkeypatch.setattr(module.Machine, "local", lambda: tiny)
    with pytest.raises(CapacityError, match="GPU"):
        llm.scenario(workload)


def test_where_not_all_requests_fit_some_wait(llm, line_end, monkeypatch):
    workload = wb.Workload.of([wb.Request(llm.tokenizer.encode(TEXTS[4]), 12)] * 64)
    whole = llm.scenario(workload)
    least = wb.fits(whole, module.Sequential()).gpu.total - whole.memory.kv_capacity / 2
    monkeypatch.setattr(module.Machine, "local", lambda: whole.machine.limit(gpu_memory=least))
    part = llm.scenario(workload)
    assert part.pipeline == whole.pipeline
    assert part.memory.kv_capacity < whole.memory.kv_capacity
    assert llm.generate([TEXTS[4]] * 64, max_tokens=12, stop_token_ids=line_end) == [ANSWERS[4]] * 64


@pytest.fixture
def with_ends(tmp_path: Path, line_end) -> Path:
    """The shipped model, whose tokenizer begins every prompt with a line end, and whose texts end with one."""
    folder = tmp_path / "ends"
    shutil.copytree(SHIPPED, folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("\n $A", special_tokens=[("\n", line_end[0])])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [line_end[0]]}))
    return folder


def test_special_tokens_and_the_end_of_sequence_are_those_of_the_checkpoint(with_ends, line_end):
    llm = wb.LLM(with_ends)
    assert llm.tokenizer.encode("copy:", special=True) == (*line_end, *llm.tokenizer.encode("copy:"))
    assert generated(llm, ()) == ANSWERS
    assert "\n" in llm.generate(TEXTS[:1], max_tokens=12, ignore_eos=True)[0]


def test_what_cannot_be_is_refused_in_one_sentence(llm):
    with pytest.raises(WorkloadError, match=r"give \['copy:iwfbzx='\]"):
        llm.generate(TEXTS[0])
    with pytest.raises(WorkloadError, match="token"):
        llm.generate([""])
    with pytest.raises(WorkloadError, match="temperature"):
        llm.generate(TEXTS, temperature=-1.0)
    with pytest.raises(CheckpointError, match="has no weights here"):
        wb.LLM(wb.models["mixtral-8x7b"])
