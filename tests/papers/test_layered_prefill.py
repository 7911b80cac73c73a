"""Layered Prefill: groups of layers, expert traffic, energy, and requests that queue for one server."""

import tomllib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from workbench.core.catalogue import data_path
from workbench.core.energy import EnergyModel
from workbench.core.latency import Slo, attainment, capacity
from workbench.models import models
from workbench.perfmodels import layered_prefill as lp
from workbench.perfmodels.coverage import measured_coverage, skewed, uniform
from workbench.perfmodels.layered_prefill.queue import Arrivals, IterationTime, serve
from workbench.scheduler.layered_prefill import group_bounds

QWEN = models["qwen3-30b-a3b"]
FULL = QWEN.routed_bytes
TEXT = tomllib.loads(data_path("catalogue/published/layered_prefill.toml").read_text(encoding="utf-8"))
TIME = IterationTime(**{key: value for key, value in TEXT["iteration_time"].items() if key != "source"})
CONCAVE = (uniform(128, 8), skewed(128, 8), measured_coverage)

prompts = st.integers(1, 24576)
decodes = st.integers(0, 256)
coverages = st.sampled_from(CONCAVE)


def arrivals(rate: float, requests: int = 60, *, seed: int = 0, dataset: str = "arxiv") -> Arrivals:
    lengths = TEXT["lengths"][dataset]
    prompt, output = ((lengths[part]["mean"], lengths[part]["std"]) for part in ("prompt", "output"))
    return Arrivals.draw(rate, requests, prompt=prompt, output=output, seed=seed)


def both(draw: Arrivals, coverage=measured_coverage):
    return [serve(draw, QWEN, TIME, coverage, layered=layered) for layered in (False, True)]


# -- groups ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(1, 100), st.sampled_from([256, 512, 1024]))
def test_groups_grow_with_the_prompt_between_one_and_the_layers(prompt, layers, granularity):
    groups = lp.layer_groups(prompt, layers, granularity=granularity)
    assert 1 <= groups <= layers
    assert groups <= lp.layer_groups(prompt + 1, layers, granularity=granularity)
    if groups < layers:
        assert prompt <= groups * granularity


def test_the_paper_as_printed_would_have_more_groups_than_gpt_oss_layers():
    assert lp.layer_groups(13_000, models["gpt-oss-20b"].num_hidden_layers) == 24
    assert np.ceil(13_000 / 512) == 26


@given(st.integers(1, 100).flatmap(lambda layers: st.tuples(st.just(layers), st.integers(1, layers))))
def test_bounds_of_groups_cover_every_layer_once_in_near_equal_parts(case):
    layers, groups = case
    bounds = group_bounds(layers, groups)
    assert [layer for start, end in bounds for layer in range(start, end)] == list(range(layers))
    sizes = {end - start for start, end in bounds}
    assert max(sizes) - min(sizes) <= 1


# -- traffic -----------------------------------------------------------------------------------------------------


@given(prompts, decodes, coverages)
def test_layered_prefill_reads_no_more_than_chunked(prompt, decode, coverage):
    """Where one more token adds the less the more there are, as coverage does; both take the same iterations."""
    chunked, chunks = lp.prefill_traffic(FULL, prompt, decode, coverage)
    layered, groups = lp.prefill_traffic(FULL, prompt, decode, coverage, chunk=None, layers=48)
    assert groups == chunks
    assert layered <= chunked * (1 + 1e-9)


@given(st.integers(1, 100_000), decodes, coverages)
def test_both_together_read_no_more_than_chunks_alone(prompt, decode, coverage):
    chunked, _ = lp.prefill_traffic(FULL, prompt, decode, coverage)
    combined, _ = lp.prefill_traffic(FULL, prompt, decode, coverage, chunk=512 * 48, layers=48)
    assert combined <= chunked * (1 + 1e-9)


@given(st.integers(1, 512), decodes, coverages)
def test_a_prompt_of_one_chunk_is_the_same_either_way(prompt, decode, coverage):
    layered = lp.prefill_traffic(FULL, prompt, decode, coverage, chunk=None, layers=48)
    assert lp.prefill_traffic(FULL, prompt, decode, coverage) == layered


@given(prompts, st.integers(0, 255), coverages)
def test_more_decodes_read_more(prompt, decode, coverage):
    for choice in ({}, {"chunk": None, "layers": 48}):
        less, more = (lp.prefill_traffic(FULL, prompt, count, coverage, **choice)[0] for count in (decode, decode + 1))
        assert less <= more * (1 + 1e-12)


@given(st.lists(st.integers(0, 256), min_size=1, max_size=6), st.integers(1, 8192), coverages)
def test_an_array_gives_what_its_numbers_give(decode, prompt, coverage):
    groups = lp.layer_groups(prompt, 48)
    several = np.broadcast_to(lp.layered_iteration(FULL, np.array(decode), prompt, groups, coverage), len(decode))
    one_by_one = [float(lp.layered_iteration(FULL, one, prompt, groups, coverage)) for one in decode]
    assert several.tolist() == pytest.approx(one_by_one)


def test_the_ratio_of_an_iteration_is_the_exact_one_when_prompt_and_chunk_touch_everything():
    groups, decode = 18, 40
    exact = lp.layered_iteration(1.0, decode, 9194, groups, measured_coverage) / lp.chunked_iteration(
        1.0, decode, 512, measured_coverage
    )
    assert lp.iteration_ratio(groups, decode, measured_coverage) == pytest.approx(exact, abs=0.02)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: lp.layer_groups(-1, 48), "prompt must be at least 0"),
        (lambda: lp.layer_groups(1, 0), "layers must be at least 1"),
        (lambda: group_bounds(4, 5), "groups must be between 1 and the 4 layers"),
        (lambda: lp.prefill_traffic(1.0, 0, 0, measured_coverage), "prompt must be at least 1"),
        (lambda: lp.layered_iteration(1.0, 0, 1, 0, measured_coverage), "groups must be at least 1"),
        (lambda: lp.relative_change(1, 0), "old must be above 0"),
        (lambda: EnergyModel(1, 1, 1).joules(-1, 0, 0), "seconds must be at least 0"),
        (lambda: EnergyModel(1, 1, 0).joules(1, 0, np.inf), "flops must be at least 0 and finite, not inf"),
        (lambda: lp.mean_power(0, np.inf, 1), "rate must be at least 0 and finite, not inf"),
        (lambda: attainment([], [], Slo(1, 1)), "at least one request"),
        (lambda: Arrivals.draw(0, 1, prompt=(1, 1), output=(1, 1), seed=0), "rate must be above 0"),
        (lambda: drawn(2.7), "requests must be a whole number from 1, not 2.7; give how many to draw"),
        (lambda: drawn(0), "requests must be a whole number from 1, not 0"),
        (lambda: IterationTime(np.nan, 0, 0), "bandwidth must be above 0 and finite, not nan; give bytes per second"),
        (lambda: IterationTime(-1, 0, 0), "bandwidth must be above 0 and finite, not -1"),
        (lambda: IterationTime(0, 0, 0), "bandwidth must be above 0 and finite, not 0"),
        (lambda: IterationTime(1, -1, 0), "per_token must be at least 0 and finite, not -1; give seconds"),
        (lambda: IterationTime(1, 0, np.nan), "fixed must be at least 0 and finite, not nan; give seconds"),
        (lambda: Arrivals([0, 2, 1], [1] * 3, [1] * 3), "time must not fall, but 1 follows 2; sort the requests"),
        (lambda: Arrivals([np.nan], [1], [1]), "time must be at least 0 and finite, not nan"),
        (lambda: Arrivals([-1], [1], [1]), "time must be at least 0 and finite, not -1"),
        (lambda: Arrivals([0], [0], [1]), "prompt must be a whole number from 1, not 0; give tokens"),
        (lambda: Arrivals([0], [1], [-1]), "output must be a whole number from 1, not -1; give tokens"),
        (lambda: Arrivals([0], [1.5], [1]), "prompt lengths must be whole numbers"),
        (lambda: Arrivals([], [], []), "Arrivals must have one time, prompt and output per request, at least one"),
        (lambda: Arrivals([0, 1], [1, 1], [1]), r"not the shapes \(2,\), \(2,\) and \(1,\); give lists as long"),
        (lambda: Arrivals(0, 1, 1), r"not the shapes \(\), \(\) and \(\)"),
        (lambda: queued(512.5), "granularity must be a whole number from 1, not 512.5; give tokens, for example 512"),
        (lambda: queued(0), "granularity must be a whole number from 1, not 0"),
        (lambda: capacity(lambda rate: 1.0, target=0.9, low=1, high=2), "do not bracket the attainment"),
        (lambda: capacity(lambda rate: np.nan, target=0.9, low=1, high=2), "do not bracket the attainment"),
    ],
)
def test_outside_its_domain_a_formula_says_what_it_expects(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def drawn(requests: float) -> Arrivals:
    return Arrivals.draw(1, requests, prompt=(1, 1), output=(1, 1), seed=0)


def queued(granularity: float):
    return serve(Arrivals([0], [1], [1]), QWEN, TIME, measured_coverage, layered=True, granularity=granularity)


# -- the queue ---------------------------------------------------------------------------------------------------


def test_one_request_alone_meets_its_groups_and_then_decodes():
    draw = Arrivals(np.array([3.0]), np.array([1024]), np.array([3]))
    chunked, layered = both(draw, uniform(128, 8))
    assert (chunked.iterations, layered.iterations) == (4, 4)  # two of prefill, two of decode
    one = (QWEN.routed_bytes * uniform(128, 8)(512)) / TIME.bandwidth + 512 * TIME.per_token + TIME.fixed
    assert chunked.ttft[0] == pytest.approx(2 * one)
    half = QWEN.routed_bytes / 2 * uniform(128, 8)(1024) / TIME.bandwidth + 512 * TIME.per_token + TIME.fixed
    assert layered.ttft[0] == pytest.approx(2 * half)
    assert len(layered.gaps) == 2
    assert layered.end_to_end[0] == pytest.approx(layered.ttft[0] + layered.gaps.sum())


@pytest.mark.parametrize("layered", [False, True])
def test_arrivals_may_be_lists_and_the_granularity_a_whole_float(layered):
    lists = [0.0, 0.1, 0.1], [600, 30, 2000], [3, 1, 7]
    ours, theirs = (
        serve(draw, QWEN, TIME, measured_coverage, layered=layered, granularity=granularity)
        for draw, granularity in ((Arrivals(*lists), 256.0), (Arrivals(*map(np.array, lists)), 256))
    )
    assert ours.end_to_end.tolist() == theirs.end_to_end.tolist()
    assert (ours.iterations, ours.kv_bytes) == (theirs.iterations, theirs.kv_bytes)


@examples(25)
@given(st.integers(0, 1000), st.floats(0.2, 3), st.booleans())
def test_every_request_is_served_in_full_and_time_adds_up(seed, rate, layered):
    draw = arrivals(rate, 20, seed=seed)
    done = serve(draw, QWEN, TIME, measured_coverage, layered=layered)
    assert len(done.gaps) == (draw.output - 1).sum()
    assert np.all(done.ttft > 0)
    spread = done.end_to_end - done.ttft
    assert spread.sum() == pytest.approx(done.gaps.sum())
    assert np.all(done.worst_gap <= spread + 1e-12)
    assert done.tokens == draw.prompt.sum() + draw.output.sum()


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=8), st.booleans())
def test_decodes_read_what_their_sliding_windows_leave_of_the_cache(requests, layered):
    gpt = models["gpt-oss-20b"]
    assert gpt.sliding_window == 128
    prompt, output = np.array(requests).T
    served = serve(Arrivals(0.05 * np.arange(len(prompt)), prompt, output), gpt, TIME, uniform(32, 4), layered=layered)
    lives = gpt.attended_below(prompt + output - 2) - gpt.attended_below(prompt - 1)
    assert served.kv_bytes == pytest.approx(lives.sum() * gpt.kv_bytes_per_token(gpt.dtype))


def test_a_prompt_above_granularity_times_layers_takes_several_passes():
    draw = Arrivals(np.array([0.0]), np.array([2 * 512 * 48]), np.array([1]))
    assert serve(draw, QWEN, TIME, measured_coverage, layered=True).iterations == 2 * 48


def test_small_requests_that_wait_share_one_prefill():
    draw = Arrivals(np.array([0.0, 0.0, 0.0]), np.array([200, 300, 13]), np.array([1, 1, 1]))
    chunked, layered = both(draw)
    assert chunked.iterations == layered.iterations == 2
    assert layered.ttft[0] == layered.ttft[1] < layered.ttft[2]


def test_layered_prefill_is_faster_reads_less_and_saves_energy_on_long_prompts():
    energy = EnergyModel(**{key: value for key, value in TEXT["energy_model"].items() if key != "source"})
    chunked, layered = both(arrivals(1.3))
    assert layered.ttft.mean() < chunked.ttft.mean()
    assert layered.gaps.mean() < chunked.gaps.mean()
    assert layered.expert_bytes < 0.6 * chunked.expert_bytes
    assert layered.joules_per_token(energy, QWEN) < chunked.joules_per_token(energy, QWEN)


def test_without_skew_hardly_anything_would_be_saved_on_short_prompts():
    """Why the measured coverage is the default: uniform routing already touches all experts in decode."""
    draw = arrivals(4.4, 200, dataset="sharegpt")
    saved = [
        1 - layered.expert_bytes / chunked.expert_bytes for chunked, layered in (both(draw), both(draw, CONCAVE[0]))
    ]
    assert saved[0] > 0.08
    assert saved[1] < 0.03


def test_a_server_sustains_a_higher_rate_with_layers_than_with_chunks():
    """Section 5.2: below 1.5 and at least 1.7 requests/s on arXiv."""
    slo = Slo(**TEXT["slo"]["qwen_arxiv"])

    def attained(layered):
        return lambda rate: float(
            np.mean(
                [
                    serve(arrivals(rate, 150, seed=seed), QWEN, TIME, measured_coverage, layered=layered).attainment(
                        slo
                    )
                    for seed in (0, 1)
                ]
            )
        )

    chunked, layered = (capacity(attained(kind), target=0.9, low=0.8, high=4.0) for kind in (False, True))
    assert 1.2 < chunked < 1.7
    assert layered > max(1.7, 1.14 * chunked)


def test_one_late_gap_or_first_token_misses_the_slo():
    assert attainment([1, 1, 6, 1], [0.1, 0.2, 0.1, 0.125], Slo(5, 0.125)) == 0.5


def test_the_same_seed_draws_the_same_requests():
    one, other = arrivals(1.0), arrivals(1.0)
    assert one.time.tolist() == other.time.tolist()
    assert one.prompt.tolist() == other.prompt.tolist()


def test_lengths_have_the_published_mean_and_spread():
    draw = arrivals(1.0, 20_000)
    for values, part in ((draw.prompt, "prompt"), (draw.output, "output")):
        wanted = TEXT["lengths"]["arxiv"][part]
        assert values.mean() == pytest.approx(wanted["mean"], rel=0.02)
        assert values.std() == pytest.approx(wanted["std"], rel=0.03)
        assert np.quantile(values, 0.9) == pytest.approx(wanted["p90"], rel=0.05)
    assert np.diff(draw.time).mean() == pytest.approx(1.0, rel=0.03)
