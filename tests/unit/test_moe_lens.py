"""MoE-Lens' equations far from the paper's numbers: limits, monotony, domains, and arrays that equal their numbers."""

import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from workbench.perfmodels import moe_lens as ml

LENGTHS = st.integers(1, 4000)
FACTORS = st.floats(1.0, 50.0)
BLOCKS = st.sampled_from([1, 2, 16, 100])


@st.composite
def jobs(draw):
    """Any p, g, K, N and the options of `stage2`, in which one sequence fits at least."""
    p, g, block = draw(LENGTHS), draw(LENGTHS), draw(BLOCKS)
    blocks = -(-(p + g) // block) * draw(st.integers(1, 5000))
    rates = {"block": block, "pass_seconds": draw(st.floats(0.01, 100)), "pass_tokens": draw(st.floats(1, 1e5))}
    return (p, g, draw(st.integers(1, 10**6)), blocks), rates


EQ12, LIVES = st.sampled_from(ml.Eq12), st.sampled_from(ml.Life)


# -------------------------------------------------------------------------------------------------- arrays and domains

FORMULAS = {
    "intensity": lambda a, b: ml.intensity(a, experts=b + 8, chosen=2, expert_ratio=a, group_size=b),
    "tokens_to_saturate": lambda a, b: ml.tokens_to_saturate(a, b, 0.25),
    "kv_to_saturate": lambda a, b: ml.kv_to_saturate(a, b, 131072),
    "weight_pass_seconds": ml.weight_pass_seconds,
    "gpu_tokens_per_second": ml.gpu_tokens_per_second,
    "tokens_per_pass": ml.tokens_per_pass,
    "closed": lambda a, b: ml.parallelism_memory_efficiency(a, b, form=ml.PmeForm.CLOSED),
    "inclusive": lambda a, b: ml.parallelism_memory_efficiency(a, b, form=ml.PmeForm.SUM_INCLUSIVE),
    "exact": lambda a, b: ml.parallelism_memory_efficiency(a, b, form=ml.PmeForm.EXACT),
    "stage1": lambda a, b: ml.stage1(a, b, 1e6, 5.0, 4000.0),
    "kv_tokens_at_knee": lambda a, b: ml.kv_tokens_at_knee(a, b, 18500),
    "host_bandwidth_needed": lambda a, b: ml.host_bandwidth_needed(a, b, 2e10),
    "kv_bandwidth_needed": lambda a, b: ml.kv_bandwidth_needed(a, b, 2e10),
    "cpu_flops_needed": ml.cpu_flops_needed,
    "effective_kv_capacity": ml.effective_kv_capacity,
    "blocks_over_life": lambda a, b: ml.blocks_over_life(a, b, 16),
    "admission_rate": lambda a, b: ml.admission_rate(a, b, 1000, 16),
    "overlapped_sequences": lambda a, b: ml.overlapped_sequences(a, b, 1000, 16),
    "separated_sequences": lambda a, b: ml.separated_sequences(a, b, 1000, 16),
    "separated_tok_s": lambda a, b: ml.separated_tok_s(a, b, 77, 1000, block=16, pass_seconds=5, pass_tokens=500),
    "stage2 printed": lambda a, b: (
        ml.stage2(a, b, 99, 1000, block=16, pass_seconds=5, pass_tokens=500, eq12=ml.Eq12.PAPER).gen_tok_s
    ),
    "stage2 mended": lambda a, b: ml.stage2(a, b, 99, 1000, block=16, pass_seconds=5, pass_tokens=500).proc_tok_s,
    "stage1_utilisation": lambda a, b: ml.stage1_utilisation(a, b, 1e6, 18500),
    "stage2_utilisation": lambda a, b: ml.stage2_utilisation(a, b, 1000, 1e6, 18500, block=16),
}


@pytest.mark.parametrize("name", FORMULAS)
@given(a=st.lists(LENGTHS, min_size=3, max_size=3), b=st.lists(LENGTHS, min_size=2, max_size=2))
def test_an_array_gives_what_its_numbers_give_one_by_one(name, a, b):
    formula = FORMULAS[name]
    grid = formula(np.array(a)[None, :], np.array(b)[:, None])
    assert grid.shape == (2, 3)
    assert grid.tolist() == [[pytest.approx(formula(x, y), rel=1e-12) for x in a] for y in b]
    assert isinstance(formula(a[0], b[0]), float)


@pytest.mark.parametrize("wrong", [-1, np.nan, np.inf, np.array([5.0, -2.0])])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_number_outside_the_domain_is_named_with_what_was_expected(name, wrong):
    with pytest.raises(ValueError, match=r"\w+ must be .*, not .*; give \w+"):
        FORMULAS[name](wrong, 5)
    with pytest.raises(ValueError, match=r"\w+ must be .*, not .*; give \w+"):
        FORMULAS[name](5, wrong)


def test_a_sequence_that_fits_no_cache_is_an_error():
    job = {"block": 16, "pass_seconds": 1, "pass_tokens": 10}
    assert ml.stage2(100, 61, 5, 10, **job).gen_tok_s > 0
    with pytest.raises(ValueError, match="holds no whole sequence"):
        ml.stage2(100, 62, 5, 10, **job)
    with pytest.raises(ValueError, match="holds no whole sequence"):
        ml.separated_tok_s(100, 61, 5, 10, **job)


@pytest.mark.parametrize("block", [0, 1.5, -16])
def test_a_block_holds_a_whole_number_of_tokens(block):
    with pytest.raises(ValueError, match=r"block must be a whole number from 1, not .*; give tokens"):
        ml.blocks_over_life(98, 32, block)


def test_experts_are_chosen_among_those_there_are():
    with pytest.raises(ValueError, match="chosen is above experts"):
        ml.intensity(1, experts=4, chosen=8, expert_ratio=1, group_size=1)


@pytest.mark.parametrize("form", ml.IntensityForm)
def test_a_shape_that_no_model_has_is_refused_in_every_form(form):
    shape = {"experts": 8, "chosen": 2, "expert_ratio": 3.5, "group_size": 4}
    for name in ("chosen", "expert_ratio", "group_size"):
        with pytest.raises(ValueError, match=f"{name} must be above 0 and finite, not -4"):
            ml.intensity(1, **shape | {name: -4}, form=form)


def test_a_prefill_that_emits_a_token_needs_a_prompt():
    with pytest.raises(ValueError, match="prompt_len must be at least 1 and finite, not 0"):
        ml.parallelism_memory_efficiency(0, 1, form=ml.PmeForm.EXACT)


def test_the_units_of_table_2_hold_for_its_lengths_only():
    with pytest.raises(ValueError, match="multiples of 256"):
        ml.kv_to_saturate(19200, 300, 131072, units=ml.Units.PAPER)
    assert ml.kv_to_saturate(19200, 256, 131072) == 644_245_094_400


# ------------------------------------------------------------------------------------------------------ Equations 1-7


def test_the_normalised_form_as_printed_counts_the_experts_twice():
    """SPEC 1.1, Mixtral-8x7B."""
    shape = {"experts": 8, "chosen": 2, "expert_ratio": 3.5, "group_size": 4}
    printed, exact = (
        ml.intensity(1, **shape, form=form) for form in (ml.IntensityForm.PRINTED, ml.IntensityForm.EXACT)
    )
    assert printed == pytest.approx(0.26100, abs=5e-6)
    assert exact == pytest.approx(0.27168, abs=5e-6)


@given(st.integers(1, 64), st.integers(0, 200), st.floats(0.1, 8), st.integers(1, 16), st.floats(1, 1e5))
def test_intensity_lies_between_k_over_e_and_one_per_token(chosen, more, ratio, group, tokens):
    shape = {"experts": chosen + more, "chosen": chosen, "expert_ratio": ratio, "group_size": group}
    value = ml.intensity(tokens, **shape)
    assert ml.intensity(tokens, **shape, form=ml.IntensityForm.APPROXIMATE) <= value * (1 + 1e-12)
    assert value <= tokens * (1 + 1e-12)


@given(LENGTHS, LENGTHS)
def test_the_sums_of_pme_are_those_of_a_sequence_counted_out(p, g):
    found = {form: ml.parallelism_memory_efficiency(p, g, form=form) for form in ml.PmeForm}
    j = np.arange(g + 1)
    assert found[ml.PmeForm.SUM_INCLUSIVE] == pytest.approx((p + g) / (p + j).sum())
    assert found[ml.PmeForm.EXACT] == pytest.approx((p + g - 1) / (p + j[:-1]).sum())
    assert found[ml.PmeForm.CLOSED] == pytest.approx((p + g) / (g * (2 * p + g) / 2))


@given(LENGTHS, LENGTHS, st.floats(1, 1e8), FACTORS)
def test_stage_1_rises_with_memory_to_the_gpus_limit_and_no_further(p, g, tokens, factor):
    rate = 4000.0
    less, more = (ml.stage1(p, g, m, 5.0, rate) for m in (tokens, tokens * factor))
    assert less <= more <= rate
    assert ml.stage1(p, g, ml.kv_tokens_at_knee(p, g, rate * 5.0) * 1.001, 5.0, rate) == rate
    assert ml.stage1(p, g, ml.kv_tokens_at_knee(p, g, rate * 5.0) * 0.999, 5.0, rate) < rate


@given(LENGTHS, st.integers(1, 4000))
def test_shorter_outputs_use_memory_better(p, g):
    for form in ml.PmeForm:
        assert ml.parallelism_memory_efficiency(p, g, form=form) > ml.parallelism_memory_efficiency(p, g + 1, form=form)


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_handing_kv_out_as_sequences_grow_is_worth_at_most_twice_the_cache(p, g):
    assert 1 < ml.effective_kv_capacity(p, g) <= 2


def test_without_kv_the_host_only_streams_the_weights():
    assert ml.host_bandwidth_needed(94e9, 0, 19.5e9) == 19.5e9
    assert ml.kv_bandwidth_needed(94e9, 188e9, 19.5e9) == 39e9  # twice the model's size, as in Figure 10
    assert ml.host_bandwidth_needed(94e9, 200e9, 20e9) == pytest.approx(62.55e9, rel=1e-3)  # the text's 61 to 63


# ----------------------------------------------------------------------------------------------------- Equations 8-14


@given(LENGTHS, st.integers(1, 300), BLOCKS)
def test_blocks_over_a_life_are_the_sum_counted_out(p, g, block):
    held = -(-(p + np.arange(g + 1)) // block)
    assert ml.blocks_over_life(p, g, block) == held.sum()
    assert ml.blocks_over_life(p, g, block, life=ml.Life.EXCLUSIVE) == held[:-1].sum()
    assert ml.blocks_over_life(p - 0.5 if p > 1 else p, g, block) == held.sum()


@given(jobs(), FACTORS, EQ12, LIVES)
def test_more_memory_requests_or_gpu_never_lowers_throughput(job, factor, eq12, life):
    """The print is exempt for g > 2p: it makes tokens, the fewer per request the larger the job."""
    (p, g, k, n), rates = job

    def rate(k: float, n: float, tokens: float) -> float:
        return ml.stage2(p, g, k, n, **rates | {"pass_tokens": tokens}, eq12=eq12, life=life).gen_tok_s

    least, tokens = rate(k, n, rates["pass_tokens"]) * (1 - 1e-9), rates["pass_tokens"]
    assert rate(k, n * factor, tokens) >= least
    assert rate(k, n, tokens * factor) >= least
    if eq12 is ml.Eq12.MENDED or g <= 2 * p:
        assert rate(k * factor, n, tokens) >= least


@given(jobs(), LIVES)
def test_the_mended_equation_keeps_the_tokens_and_the_longest_output(job, life):
    (p, g, k, n), rates = job
    found = ml.stage2(p, g, k, n, **rates, life=life)
    gpu = rates["pass_tokens"] / rates["pass_seconds"]
    assert found.gpu_tok_s * (p + g) / g <= gpu * (1 + 1e-9)
    assert found.gpu_tok_s <= k / rates["pass_seconds"] * (1 + 1e-9)


@given(jobs())
def test_printed_and_mended_agree_where_outputs_are_short(job):
    (longer, g, _, _), rates = job
    p = 50 * g + longer
    n = rates["pass_tokens"]
    requests = 10 * n * g / (p + g) + 10
    printed, mended = (ml.stage2(p, g, requests, np.inf, **rates, eq12=eq12).gpu_tok_s for eq12 in ml.Eq12)
    assert printed == pytest.approx(mended, rel=2e-3)


@given(jobs(), EQ12)
def test_an_endless_job_is_limited_by_the_gpu_or_by_g_over_g_plus_1_of_stage_1(job, eq12):
    (p, g, _, n), rates = job
    found = ml.stage2(p, g, np.inf, n, **rates | {"block": 1}, eq12=eq12) if n >= p + g else None
    assume(found is not None)
    gpu = rates["pass_tokens"] / rates["pass_seconds"]
    memory = ml.stage1(p, g, n, rates["pass_seconds"], 1e30)
    assert found.gpu_tok_s * found.proc_per_gen == pytest.approx(gpu)
    assert found.memory_tok_s * found.proc_per_gen == pytest.approx(memory * g / (g + 1))


@given(jobs())
def test_larger_blocks_hold_fewer_tokens_that_are_used(job):
    (p, g, k, n), rates = job
    tokens = n * rates["block"]
    fine, coarse = (ml.stage2(p, g, k, tokens / b, **rates | {"block": b}).gen_tok_s for b in (1, rates["block"]))
    assert coarse <= fine * (1 + 1e-9)


def test_a_job_whose_prologue_would_need_more_prompts_than_it_has_is_clamped():
    """SPEC 1.5: without the clamp, AIME at 70 GB (K=6807) comes out negative."""
    job = {"block": 16, "pass_seconds": 4.82, "pass_tokens": 18500}
    found = ml.stage2(128, 512, 6807, 33378, **job, eq12=ml.Eq12.PAPER)
    assert found.gpu_tok_s == pytest.approx(6807 / (2 * 4.82))


def test_overlap_and_separated_phases_by_hand():
    """4 sequences of 3 + 2 tokens in 10 blocks of one token, 6 tokens per pass: two batches of 1 + 1 iterations."""
    job = {"block": 1, "pass_seconds": 2.0, "pass_tokens": 6}
    assert ml.separated_sequences(3, 2, 10, 1) == 2
    assert ml.separated_tok_s(3, 2, 4, 10, **job) == pytest.approx(8 / (2 * 2 * 2.0))
    assert ml.separated_tok_s(3, 2, 5, 10, **job) == pytest.approx(10 / (3 * 2 * 2.0))
    assert ml.admission_rate(3, 2, 12, 1) == 1
    assert ml.overlapped_sequences(3, 2, 12, 1) == 2


@given(jobs())
def test_separated_phases_push_no_more_tokens_through_the_gpu_than_it_computes(job):
    """A job of one prompt longer than a pass, too: it takes as many passes as its tokens fill."""
    (p, g, k, n), rates = job
    processed = ml.separated_tok_s(p, g, k, n, **rates) * (p + g - 1) / g
    assert processed <= rates["pass_tokens"] / rates["pass_seconds"] * (1 + 1e-9)


def test_a_map_of_forty_thousand_points_takes_less_than_50_ms():
    p, g = np.arange(1.0, 1001, 5)[None, :], np.arange(1.0, 1001, 5)[:, None]
    spent = []
    for _ in range(5):
        began = time.process_time()
        found = ml.stage2(p, g, 20_000, 33_378, block=16, pass_seconds=4.82, pass_tokens=18_500).gen_tok_s
        spent.append(time.process_time() - began)
    assert found.shape == (200, 200)
    assert min(spent) < 0.05


# --------------------------------------------------------------------------------------------------- maps and profiler


def test_figure_3a_is_a_map_of_every_pair_of_lengths():
    p, g = np.array([128, 512, 1000]), np.array([128, 512])
    found = ml.utilisation_over_lengths(p, g, 1e6, 18500)
    assert found.shape == (2, 3)
    assert found[1, 0] == pytest.approx(ml.stage1(128, 512, 1e6, 5.0, 18500 / 5.0) / (18500 / 5.0))
    assert found.max() <= 1


def test_figure_3b_as_the_project_reads_it():
    """SPEC 1.3: 0.48 of the GPU at 100 GB and 32 GB/s, 0.29 at 19.5 GB/s."""
    rate, tokens = ml.gpu_tokens_per_second(150e12, 25.497e9), 100e9 / 131072
    limits = [ml.tokens_per_pass(rate, ml.weight_pass_seconds(94e9, b)) for b in (32e9, 19.5e9)]
    assert [ml.stage1_utilisation(100, 128, tokens, n) for n in limits] == pytest.approx([0.48, 0.29], abs=0.005)


def test_figure_4_rises_with_memory_and_with_the_job_to_stage_1():
    tokens, requests = np.linspace(2e5, 4e6, 40), np.array([2e4, 5e4, 2e5, 1e9])
    curves = ml.utilisation_over_capacity(100, 128, requests, tokens, 18500, block=16)
    bound = ml.stage1_utilisation(100, 128, tokens, 18500)
    assert curves.shape == (4, 40)
    assert (np.diff(curves, axis=1) >= 0).all()
    assert (np.diff(curves, axis=0) >= 0).all()
    assert (curves <= bound).all()
    assert curves[-1, -1] == pytest.approx(1, rel=1e-4)


@given(st.floats(0, 10), st.floats(1e-6, 1), st.lists(st.integers(0, 10**5), min_size=2, max_size=9, unique=True))
def test_the_profiler_finds_the_line_that_the_points_lie_on(fixed, per_token, tokens):
    found = ml.fit_gpu_time(tokens, [fixed + per_token * n for n in tokens])
    assert found.per_token == pytest.approx(per_token, rel=1e-4)
    assert found.fixed == pytest.approx(fixed, abs=1e-6 * (1 + per_token * max(tokens)))
    assert ml.GpuTime(fixed, per_token).tokens_within(fixed + per_token * 500) == pytest.approx(500, rel=1e-3)


def test_the_profiler_averages_over_scattered_points():
    found = ml.fit_gpu_time([1, 1, 3, 3], [9, 11, 19, 21])
    assert (found.fixed, found.per_token) == (pytest.approx(5), pytest.approx(5))


@pytest.mark.parametrize("points", [([5], [1]), ([5, 5], [1, 2]), ([1, 2], [1]), ([], [])])
def test_the_profiler_needs_a_time_for_each_of_two_sizes(points):
    with pytest.raises(ValueError, match="two or more different numbers of tokens"):
        ml.fit_gpu_time(*points)


def test_the_profiler_refuses_times_that_do_not_rise_and_transfers_that_hide_nothing():
    with pytest.raises(ValueError, match="does not rise"):
        ml.fit_gpu_time([1, 2], [3, 3])
    with pytest.raises(ValueError, match=r"within the 2 s"):
        ml.GpuTime(2.0, 1.0).tokens_within(np.array([5.0, 1.5]))


def test_the_models_import_without_torch():
    code = "import sys; from workbench.perfmodels import moe_lens; print(sorted({'torch', 'numba'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
