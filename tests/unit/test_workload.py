"""Requests: lengths, files of prompts, and synthetic samples that say so."""

import json
import math
from dataclasses import fields

import numpy as np
import pytest

from workbench.core.errors import CatalogueError, WorkloadError
from workbench.workload import Request, Sampling, Workload, byte_tokens, workloads
from workbench.workload.request import SamplingOptions

# Mean and maximum of prompts, and output lengths: MoE-Lens, Table 3, and MoE-Lightning, Table 3.
PUBLISHED = {
    "mtbench": (98, 450, (32, 64, 128, 256)),
    "rag": (926, 1843, (128,)),
    "aime": (128, 410, (512,)),
    "mtbench-moe-lightning": (77, 418, (32, 64, 128, 256)),
    "synthetic-reasoning": (242, 256, (50,)),
    "summarization": (1693, 1984, (64,)),
}
# Mean, 90 % quantile and deviation of prompts and outputs: Layered Prefill, Table 4.
LAYERED_PREFILL = {
    "sharegpt": ((2340, 5696, 2088), (438, 834, 265)),
    "arxiv": ((9194, 17152, 5754), (231, 386, 104)),
}


@pytest.fixture
def jsonl(tmp_path):
    def write(*lines: str) -> object:
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


def test_one_number_for_each_length_serves_all_requests():
    workload = Workload.lengths(98, 32, 5)
    assert workload.prompt_len.tolist() == [98] * 5
    assert workload.output_len.tolist() == [32] * 5
    assert workload.requests == ()


def test_lengths_may_be_given_for_each_request():
    workload = Workload.lengths([1, 2, 3], 4)
    assert workload.prompt_len.tolist() == [1, 2, 3]
    assert workload.output_len.tolist() == [4, 4, 4]
    assert len(workload) == 3


def test_a_workload_does_not_share_its_lengths_with_the_caller():
    given = np.array([5, 6])
    workload = Workload.lengths(given, 1)
    given[0] = 99
    assert workload.prompt_len.tolist() == [5, 6]


@pytest.mark.parametrize(
    "make", [lambda: Workload.lengths(3, 3, 0), lambda: Workload.of([]), lambda: Workload.lengths([], 3)]
)
def test_a_workload_without_requests_is_refused(make):
    with pytest.raises(WorkloadError, match="at least one"):
        make()


@pytest.mark.parametrize(
    ("prompt", "output", "words"),
    [([4, 0], 3, "request 1 .* prompt length 0"), ([4, 4, 4], [3, 3, -2], "request 2 .* output length -2")],
)
def test_a_length_below_one_is_refused_with_its_request(prompt, output, words):
    with pytest.raises(WorkloadError, match=words):
        Workload.lengths(prompt, output)


@pytest.mark.parametrize("length", [1.5, "5", None, True, float("nan"), [1.7], [[1, 2], [3, 4]], {1}, 2**62, 10**30])
def test_lengths_are_whole_numbers_of_bearable_size(length):
    for make in (lambda: Workload.lengths(length, 2), lambda: Workload.lengths(2, length)):
        with pytest.raises(WorkloadError, match="whole numbers"):
            make()


@pytest.mark.parametrize("output_len", [1.5, "5", True, 10**30])
def test_an_output_length_that_is_no_whole_number_is_refused_wherever_it_is_given(output_len, jsonl):
    makers = (
        lambda: workloads["mtbench"].sample(3, output_len),
        lambda: Workload.from_histogram({98: 1}, requests=3, output_len=output_len),
        lambda: Workload.from_jsonl(jsonl('{"prompt": "a"}'), output_len=output_len),
        lambda: Workload.of([Request((1,), output_len)]),
    )
    for make in makers:
        with pytest.raises(WorkloadError, match="whole number"):
            make()


@pytest.mark.parametrize("requests", [1.5, "5", None, True])
def test_a_number_of_requests_that_is_no_whole_number_is_refused(requests, tmp_path):
    (tmp_path / "poems.txt").write_text("ab")
    makers = (
        lambda: workloads["mtbench"].sample(requests, 3),
        lambda: Workload.from_histogram({98: 1}, requests=requests, output_len=3),
        lambda: Workload.from_text(tmp_path / "poems.txt", requests=requests, output_len=3),
        lambda: Workload.lengths(3, 3, requests or 1.5),
    )
    for make in makers:
        with pytest.raises(WorkloadError, match="at least one"):
            make()


def test_a_workload_has_as_many_outputs_as_prompts():
    with pytest.raises(WorkloadError, match="'mine' has 2 prompts and 3 outputs; give one of each per request"):
        Workload("mine", np.array([1, 2]), np.array([1, 2, 3]))


def test_what_is_no_request_is_refused_with_its_place():
    with pytest.raises(WorkloadError, match=r"request 1 .* no Request"):
        Workload.of([Request((1,), 2), 3])


@pytest.mark.parametrize("arguments", [([1, 2], [1, 2, 3]), ([1, 2], 3, 3)])
def test_lengths_that_do_not_match_are_refused(arguments):
    with pytest.raises(WorkloadError):
        Workload.lengths(*arguments)


def test_requests_know_their_own_lengths():
    workload = Workload.of([Request((1, 2, 3), 4), Request((5,), 6)], name="two")
    assert (workload.prompt_len.tolist(), workload.output_len.tolist()) == ([3, 1], [4, 6])
    assert (workload.name, workload.synthetic) == ("two", False)


def test_a_file_gives_one_request_per_line_and_skips_empty_ones(jsonl):
    path = jsonl(
        '{"prompt": "Grüße"}', "", '{"tokens": [3, 1, 4], "output_len": 7, "temperature": 0.5, "top_p": 0.9, "seed": 3}'
    )
    first, second = Workload.from_jsonl(path, output_len=5).requests
    assert first == Request(tuple("Grüße".encode()), 5)
    assert second == Request((3, 1, 4), 7, Sampling(0.5, 0.9, 3))
    assert Workload.from_jsonl(path).name == "prompts"


def test_a_line_separator_inside_a_prompt_does_not_end_the_line(jsonl):
    text = "one\u2028two\u0085three\x0cfour"
    path = jsonl(json.dumps({"prompt": text}, ensure_ascii=False))
    assert Workload.from_jsonl(path).requests[0].prompt == byte_tokens(text)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param("{", "not valid JSON", id="broken"),
        pytest.param("[1, 2]", "must be an object", id="no object"),
        pytest.param("{}", "either 'prompt'", id="neither"),
        pytest.param('{"prompt": "a", "tokens": [1]}', "either 'prompt'", id="both"),
        pytest.param('{"prompt": "a", "max_tokens": 3}', "unknown key 'max_tokens'", id="unknown key"),
        pytest.param('{"prompt": ""}', "at least one token", id="empty prompt"),
        pytest.param('{"prompt": 5}', "prompt=5", id="prompt no text"),
        pytest.param('{"tokens": []}', "at least one token", id="no tokens"),
        pytest.param('{"tokens": [1, -2]}', "non-negative integer", id="negative token"),
        pytest.param('{"tokens": [1.5]}', "non-negative integer", id="fractional token"),
        pytest.param('{"tokens": [true]}', "non-negative integer", id="boolean token"),
        pytest.param('{"tokens": 5}', "tokens", id="tokens no list"),
        pytest.param('{"tokens": null}', "tokens", id="tokens null"),
        pytest.param('{"prompt": "a", "output_len": "8"}', "output_len='8'", id="output_len text"),
        pytest.param('{"prompt": "a", "output_len": true}', "output_len=True", id="output_len boolean"),
        pytest.param('{"prompt": "a", "seed": 1.5}', "seed=1.5", id="fractional seed"),
        pytest.param('{"prompt": "a", "temperature": "hot"}', "temperature='hot'", id="temperature text"),
        pytest.param('{"prompt": "a", "temperature": -1}', "temperature must be", id="negative temperature"),
        pytest.param('{"prompt": "a", "temperature": NaN}', "temperature must be", id="temperature NaN"),
        pytest.param('{"prompt": "a", "top_p": 0}', "top_p must lie", id="top_p zero"),
        pytest.param(
            '{"prompt": "a", "temperature": 1%s}' % (400 * "0"), "temperature must be", id="hot beyond floats"
        ),
        pytest.param('{"prompt": ' + 100_000 * "[", "not valid JSON", id="nested without end"),
        pytest.param('{"prompt": "\\ud800"}', "no UTF-8", id="half a character"),
    ],
)
def test_a_malformed_line_is_named_with_its_number(jsonl, line, words):
    with pytest.raises(WorkloadError) as error:
        Workload.from_jsonl(jsonl('{"prompt": "fine"}', "", line))
    assert words in str(error.value)
    assert "prompts.jsonl:3" in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(WorkloadError, match=r"nowhere\.jsonl' does not exist"):
        Workload.from_jsonl(tmp_path / "nowhere.jsonl")
    with pytest.raises(WorkloadError, match=r"nowhere\.txt"):
        Workload.from_text(tmp_path / "nowhere.txt", requests=1, output_len=1)


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "binary.jsonl"
    path.write_bytes(b'{"prompt": "\xff\xfe"}\n')
    with pytest.raises(WorkloadError, match=r"binary\.jsonl"):
        Workload.from_jsonl(path)


def test_an_empty_file_is_a_workload_without_requests(jsonl):
    with pytest.raises(WorkloadError, match="'prompts' has no requests"):
        Workload.from_jsonl(jsonl(""))


def test_lines_of_a_text_are_prompts_that_repeat(tmp_path):
    path = tmp_path / "poems.txt"
    path.write_text("ab\n\ncde\n", encoding="utf-8")
    workload = Workload.from_text(path, requests=3, output_len=9)
    assert [bytes(request.prompt) for request in workload.requests] == [b"ab", b"cde", b"ab"]
    assert workload.output_len.tolist() == [9, 9, 9]


@pytest.mark.parametrize(("text", "requests"), [("\n \n", 3), ("ab\n", 0)])
def test_a_text_without_prompts_or_no_requests_is_refused(tmp_path, text, requests):
    path = tmp_path / "empty.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(WorkloadError, match="gives no prompt"):
        Workload.from_text(path, requests=requests, output_len=1)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": None},
        {"seed": 1.5},
        {"seed": "one"},
        {"top_k": -1},
        {"top_k": 2.0},
        {"min_p": 1.1},
        {"min_p": -0.1},
        {"min_p": float("nan")},
        {"repetition_penalty": 0},
        {"repetition_penalty": float("inf")},
        {"presence_penalty": 2.1},
        {"presence_penalty": float("nan")},
        {"stop": "end"},
        {"stop": ("end", "")},
        {"stop": (1,)},
        {"logprobs": -1},
        {"logprobs": True},
    ],
)
def test_sampling_outside_its_range_is_refused(options):
    with pytest.raises(WorkloadError, match=next(iter(options))):
        Sampling(**options)


def test_the_options_of_sampling_are_its_fields():
    assert SamplingOptions.__optional_keys__ == {field.name for field in fields(Sampling)}


def test_a_request_may_end_early_with_a_token_or_a_text():
    for how in (Sampling(stop=["end"]), Sampling(stop_token_ids=[3])):
        assert Workload.of([Request((1,), 2), Request((1,), 2, how)]).may_end
    assert not Workload.of([Request((1,), 2)]).may_end


def test_mtbench_has_the_published_mean_and_never_more_than_its_maximum():
    sample = workloads["mtbench"].sample(20_000, 128, seed=0)
    assert sample.prompt_len.mean() == pytest.approx(98, rel=0.02)
    assert 1 <= sample.prompt_len.min() <= sample.prompt_len.max() <= 450
    assert set(sample.output_len.tolist()) == {128}
    assert sample.synthetic


def test_every_published_workload_is_there_and_says_where_it_comes_from():
    assert set(workloads) == {*PUBLISHED, *LAYERED_PREFILL}
    for workload in workloads.values():
        sample = workload.sample(5, 8, seed=3)
        assert sample.synthetic
        assert sample.source.startswith(workload.source)
        assert sample.source.endswith("seed 3")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_means_are_met_within_two_percent_and_maxima_never_exceeded(name):
    mean, maximum, outputs = PUBLISHED[name]
    drawn = workloads[name].sample(20_000, 1, seed=1).prompt_len
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert 0.8 * maximum < drawn.max() <= maximum
    assert drawn.min() >= 1
    assert workloads[name].output == outputs


@pytest.mark.parametrize("name", LAYERED_PREFILL)
def test_means_deviations_and_quantiles_of_layered_prefills_workloads_are_near_the_published_ones(name):
    """Means within 2.5 %, deviations within 6 % (arXiv is cut at 31500 tokens), 90 % quantiles within 12 %."""
    sample = workloads[name].sample(20_000, seed=1)
    for drawn, (mean, p90, deviation) in zip(
        (sample.prompt_len, sample.output_len), LAYERED_PREFILL[name], strict=True
    ):
        assert drawn.mean() == pytest.approx(mean, rel=0.025)
        assert drawn.std() == pytest.approx(deviation, rel=0.06)
        assert np.quantile(drawn, 0.9) == pytest.approx(p90, rel=0.12)


def test_layered_prefills_prompts_fit_models_of_32768_positions():
    for name in LAYERED_PREFILL:
        sample = workloads[name].sample(20_000, seed=2)
        assert (sample.prompt_len + sample.output_len).max() < 32768


def test_an_output_length_may_be_given_drawn_or_the_only_published_one():
    assert set(workloads["sharegpt"].sample(50, 7).output_len.tolist()) == {7}
    assert len(set(workloads["sharegpt"].sample(50).output_len.tolist())) > 20
    assert set(workloads["aime"].sample(50).output_len.tolist()) == {512}


def test_one_of_several_published_output_lengths_has_to_be_chosen():
    with pytest.raises(WorkloadError, match=r"mtbench was published with output lengths 32, 64, 128, 256; say which"):
        workloads["mtbench"].sample(10)


def test_given_output_lengths_do_not_change_the_prompts():
    draw = workloads["sharegpt"].sample
    assert np.array_equal(draw(100, seed=7).prompt_len, draw(100, 4, seed=7).prompt_len)


def test_a_published_workload_tells_what_it_draws():
    assert str(workloads["rag"]) == "rag: prompts log-normal of mean 926, at most 1843; outputs 128 tokens"
    assert "outputs gamma of mean 438 and deviation 265" in str(workloads["sharegpt"])
    assert "at most 31500" in str(workloads["arxiv"])


def test_the_same_seed_draws_the_same_prompts():
    draw = workloads["mtbench"].sample
    assert np.array_equal(draw(100, 4, seed=7).prompt_len, draw(100, 4, seed=7).prompt_len)
    assert not np.array_equal(draw(100, 4, seed=7).prompt_len, draw(100, 4, seed=8).prompt_len)


def test_a_sample_of_nothing_is_refused():
    with pytest.raises(WorkloadError, match="mtbench needs at least one request, not 0"):
        workloads["mtbench"].sample(0, 4)


def test_an_unknown_workload_is_answered_with_the_known_ones():
    with pytest.raises(CatalogueError, match=r"no entry 'mmlu'; it has .*mtbench"):
        workloads["mmlu"]


# ---------------------------------------------------------------------------------------------- histograms of one's own


def test_a_histogram_gives_its_lengths_as_often_as_it_counts_them():
    sample = Workload.from_histogram({10: 1, 20: 3, 99: 0}, requests=20_000, output_len=5, seed=0)
    assert set(sample.prompt_len.tolist()) == {10, 20}
    assert (sample.prompt_len == 20).mean() == pytest.approx(0.75, abs=0.02)
    assert set(sample.output_len.tolist()) == {5}
    assert (sample.name, sample.synthetic) == ("histogram", True)
    assert sample.source == "drawn from a histogram of 3 rows, seed 0"


def test_pairs_of_lengths_stay_pairs():
    sample = Workload.from_histogram({(10, 1): 1, (20, 2): 1}, requests=100, seed=3)
    assert set(zip(sample.prompt_len.tolist(), sample.output_len.tolist(), strict=True)) == {(10, 1), (20, 2)}


def test_a_histogram_may_be_a_csv_file(tmp_path):
    path = tmp_path / "chat.csv"
    path.write_text("count, output, prompt\n3, 7, 10\n1, 9, 30\n", encoding="utf-8")
    sample = Workload.from_histogram(path, requests=50, seed=1)
    assert sample.name == "chat"
    same = Workload.from_histogram({(10, 7): 3, (30, 9): 1}, requests=50, seed=1)
    assert np.array_equal(sample.prompt_len, same.prompt_len)
    assert np.array_equal(sample.output_len, same.output_len)


def test_the_same_seed_draws_the_same_of_a_histogram():
    def draw(seed: int) -> list[int]:
        return Workload.from_histogram({1: 1, 2: 1}, requests=50, output_len=1, seed=seed).prompt_len.tolist()

    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize(
    ("histogram", "output_len", "words"),
    [
        ({10: 1}, None, "'histogram' has no output lengths and output_len is None; give exactly one of them"),
        ({(10, 2): 1}, 5, "'histogram' has output lengths and output_len is 5; give exactly one of them"),
    ],
)
def test_output_lengths_come_from_one_place(histogram, output_len, words):
    with pytest.raises(WorkloadError, match=words):
        Workload.from_histogram(histogram, requests=3, output_len=output_len)


def test_no_requests_of_a_histogram_are_refused():
    with pytest.raises(WorkloadError, match="needs at least one request, not 0"):
        Workload.from_histogram({10: 1}, requests=0, output_len=3)


def test_the_byte_tokenizer_gives_utf8_bytes():
    assert byte_tokens("aé") == (97, 0xC3, 0xA9)


@pytest.mark.parametrize("lengths", [[1.5, 2.7], [math.nan, 2.0], [True, True], ["a", "b"], [2**41, 1]])
def test_lengths_are_whole_numbers_of_tokens(lengths):
    for columns in ((lengths, [3, 4]), (np.array(lengths), np.array([3, 4])), ([3, 4], lengths)):
        with pytest.raises(WorkloadError, match="lengths must be whole numbers"):
            Workload("w", *columns)


def test_lengths_may_be_lists_or_narrow_numbers():
    listed, narrow = (
        Workload("w", [100, 2], [3, 4]),
        Workload("w", np.array([100, 2], np.int8), np.array([3, 4], np.int8)),
    )
    for found in (listed, narrow):
        assert (found.prompt_len.dtype, found.output_len.dtype) == (np.int64, np.int64)
        assert found.prompt_len.tolist() == [100, 2]


def test_requests_have_the_lengths_that_stand_beside_them():
    for requests in ((Request((1, 2), 4),), (Request((1, 2), 4), Request((1,), 4))):
        with pytest.raises(WorkloadError, match="have other lengths"):
            Workload("w", np.array([2, 2]), np.array([4, 4]), requests)


@pytest.mark.parametrize("prompt", ["hello", (), (1, -2), (1.5, 2.0), ((1, 2), (3, 4)), 5, (True, False), (1, True)])
def test_a_prompt_is_token_ids(prompt):
    with pytest.raises(WorkloadError, match="a prompt must be token ids"):
        Request(prompt, 2)


def test_a_request_says_how_tokens_are_chosen_in_a_sampling():
    with pytest.raises(WorkloadError, match="sampling must be a Sampling"):
        Request((1, 2), 2, "greedy")


def test_no_arrivals_are_not_all_at_once():
    with pytest.raises(WorkloadError, match="2 requests and no arrivals"):
        Workload.lengths(3, 2, 2).arriving(at=[])
    with pytest.raises(WorkloadError, match="are no seconds"):
        Workload.lengths(3, 2, 2).arriving(at=["a", "b"])
