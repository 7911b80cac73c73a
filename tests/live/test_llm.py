"""`LLM`: texts in, texts out, whatever the places of model and cache."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import tokenizers

import workbench as wb
from workbench.core.errors import CapacityError, CheckpointError, WorkloadError
from workbench.jobs import llm as module
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
    monkeypatch.setattr(module.Machine, "local", lambda device: small)
    assert {stage.device for stage in llm.scenario(workload).pipeline.stages} == {Place.CPU}
    assert generated(llm, line_end) == ANSWERS
    tiny = small.limit(gpu_memory="1kB")
    monkeypatch.setattr(module.Machine, "local", lambda device: tiny)
    with pytest.raises(CapacityError, match="GPU"):
        llm.scenario(workload)


def test_where_not_all_requests_fit_some_wait(llm, line_end, monkeypatch):
    workload = wb.Workload.of([wb.Request(llm.tokenizer.encode(TEXTS[4]), 12)] * 64)
    whole = llm.scenario(workload)
    least = wb.fits(whole, module.Sequential()).gpu.total - whole.memory.kv_capacity / 2
    monkeypatch.setattr(module.Machine, "local", lambda device: whole.machine.limit(gpu_memory=least))
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


def test_a_text_ends_before_a_text_at_which_it_stops(llm):
    """Which several tokens may spell, or a part of one."""
    found = llm.generate(TEXTS, max_tokens=12, stop=["\n"])
    assert found == ANSWERS
    assert all(text.tokens == llm.tokenizer.encode(f"{text}\n") for text in found)
    assert llm.generate(TEXTS[:3], max_tokens=12, stop=["zx", "yjg", "u\n"]) == ["iwfb", "dx", "klmp"]
    assert llm.generate(TEXTS[:1], max_tokens=12, stop=["i"]) == [""]


def test_log_probabilities_are_where_the_texts_are(llm, line_end):
    plain, asked = (
        llm.generate(TEXTS[:2], max_tokens=12, stop_token_ids=line_end, **more) for more in ({}, {"logprobs": 2})
    )
    assert plain == asked == ANSWERS[:2]
    assert [text.logprobs for text in plain] == [(), ()]
    for text in asked:
        assert len(text.logprobs) == len(text.tokens)
        for token, own in zip(text.tokens, text.logprobs, strict=True):
            assert own.best[0] == (token, own.logprob)  # it is greedy
            assert own.best[1][1] < own.logprob <= 0
    again = pickle.loads(pickle.dumps(asked[0]))
    assert (again, again.tokens, again.logprobs) == (asked[0], asked[0].tokens, asked[0].logprobs)


def test_sampling_is_the_checkpoints_unless_it_is_given(tmp_path):
    folder = tmp_path / "defaults"
    shutil.copytree(SHIPPED, folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.7, "top_k": 1, "repetition_penalty": 50.0, "min_p": None})
    )
    llm = wb.LLM(folder)
    assert llm.defaults == {"top_k": 1, "repetition_penalty": 50.0}
    greedy = wb.LLM(SHIPPED).generate(TEXTS, max_tokens=6)
    assert llm.generate(TEXTS, max_tokens=6, repetition_penalty=1.0) == greedy
    assert llm.generate(TEXTS, max_tokens=6, repetition_penalty=1.0, temperature=9.0) == greedy  # top_k is 1
    assert llm.generate(TEXTS, max_tokens=6) != greedy
    (folder / "generation_config.json").write_text('{"top_k": "many"}')
    with pytest.raises(CheckpointError, match="top_k='many'"):
        wb.LLM(folder)


@pytest.fixture
def talking(with_ends) -> wb.LLM:
    """The same, with a chat template that begins with the first token and asks as the exercises do."""
    template = "{{ bos_token }}{% for message in messages %}{{ message.role }}:{{ message.content }}={% endfor %}"
    (with_ends / "chat_template.jinja").write_text(template)
    (with_ends / "tokenizer_config.json").write_text('{"bos_token": "\\n"}')
    return wb.LLM(with_ends)


def test_a_conversation_becomes_a_prompt_by_the_checkpoints_template(talking, monkeypatch):
    asked = []
    generate = wb.LLM.generate

    def watched(self, prompts, **options):
        asked.extend(prompts)
        return generate(self, prompts, **options)

    monkeypatch.setattr(wb.LLM, "generate", watched)
    talks = [[dict(zip(("role", "content"), text.rstrip("=").split(":"), strict=True))] for text in TEXTS]
    assert talking.chat(talks, max_tokens=12) == ANSWERS
    assert talking.chat(talks[0], max_tokens=12, logprobs=0) == ANSWERS[:1]
    assert asked == [talking.tokenizer.encode(f"\n{text}") for text in (*TEXTS, TEXTS[0])]  # one first token, not two
    assert talking.chat([]) == []


def test_without_a_chat_template_there_is_no_chat(llm):
    with pytest.raises(CheckpointError, match="'tiny-moe' has no chat template"):
        llm.chat([{"role": "sort", "content": "ab"}])


def test_what_cannot_be_is_refused_in_one_sentence(llm):
    with pytest.raises(WorkloadError, match=r"give \['copy:iwfbzx='\]"):
        llm.generate(TEXTS[0])
    with pytest.raises(WorkloadError, match="token"):
        llm.generate([""])
    with pytest.raises(WorkloadError, match="temperature"):
        llm.generate(TEXTS, temperature=-1.0)
    with pytest.raises(WorkloadError, match="stop must be texts"):
        llm.generate(TEXTS, stop="\n")
    with pytest.raises(TypeError, match="temprature"):
        llm.generate(TEXTS, temprature=1.0)
    with pytest.raises(CheckpointError, match="has no weights here"):
        wb.LLM(wb.models["mixtral-8x7b"])
