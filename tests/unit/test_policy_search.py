"""MoE-Lightning's cost model by hand, its memory, and a search that brute force never beats."""

import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.examples import examples
from workbench.core.errors import CapacityError
from workbench.hardware import Device, Link, Machine
from workbench.perfmodels.moe_lightning import Job, Mode, Policy, estimate, layer_time
from workbench.perfmodels.moe_lightning.policy_memory import cpu_peak, fits, gpu_peaks
from workbench.perfmodels.moe_lightning.policy_search import (
    least_weights,
    policy_map,
    search,
    tensor_parallel,
    with_shares,
)
from workbench.reproductions.moe_lightning import MODEL, job

SMALL = replace(
    MODEL, name="small", num_hidden_layers=4, hidden_size=512, intermediate_size=1024, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, vocab_size=1000,
)  # fmt: skip


def small_machine(gpu_mb: float, cpu_mb: float, link: float, cpu_bandwidth: float) -> Machine:
    gpu = Device("gpu", gpu_mb * 1e6, 100e9, (("bf16", 1e12),))
    return Machine("small", gpu, Device("cpu", cpu_mb * 1e6, cpu_bandwidth, (("fp32", 1e11),)), Link(link, link))


small_jobs = st.builds(
    lambda *machine, lengths: Job(SMALL, small_machine(*machine), *lengths),
    st.floats(90, 260), st.floats(200, 400), st.floats(1e8, 1e11), st.floats(1e9, 2e11),
    lengths=st.tuples(st.integers(200, 800), st.integers(2, 500)),
)  # fmt: skip


def brute_force(where: Job, mode: Mode) -> float:
    """Best throughput over all small mu and N/mu and a grid of shares, placements one by one."""
    share = np.linspace(0, 1, 6)
    micro, count, weights, kv = np.meshgrid(np.arange(1.0, 25), np.arange(1.0, 25), share, share, indexing="ij")
    best = 0.0
    for on_gpu in (0, 1):
        for experts in (0, 1):
            policy = Policy(micro * count, micro, on_gpu, experts, weights * experts, kv * on_gpu)
            fitting = np.broadcast_to(fits(where, policy, mode), micro.shape)
            if fitting.any():
                best = max(best, float(np.asarray(estimate(where, policy, mode).gen_tok_s)[fitting].max()))
    return best


@examples(15)
@given(small_jobs, st.sampled_from([Mode.PAPER, Mode.FULL]))
def test_search_fits_and_is_never_beaten_by_brute_force(where, mode):
    best = brute_force(where, mode)
    assume(best)
    found = search(where, mode)
    assert fits(where, found.policy, mode)
    assert found.policy.batch % found.policy.micro_batch == 0
    assert found.estimate.gen_tok_s >= best * (1 - 1e-9)


@pytest.mark.parametrize("mode", [Mode.PAPER, Mode.FULL])
def test_search_is_never_beaten_by_any_pair_of_micro_batch_and_count(mode):
    """Beyond 64 not all of them are tried at first; the best is still found."""
    where = job("s2", 77, 32)
    micro, count = np.meshgrid(np.arange(1.0, 300), np.arange(1.0, 120), indexing="ij")
    policy = with_shares(where, Policy(micro * count, micro), mode)
    best = np.asarray(estimate(where, policy, mode).gen_tok_s)[fits(where, policy, mode)].max()
    found = search(where, mode)
    assert found.policy.micro_batch > 64
    assert found.estimate.gen_tok_s >= best * (1 - 1e-9)


@examples(15)
@given(small_jobs, st.sampled_from([Mode.PAPER, Mode.FULL]))
def test_search_tells_how_far_the_policies_reach_that_are_as_good(where, mode):
    """All pairs up to 40 were among those tried: none within 1 % of the best lies outside."""
    micro, count = (pairs.ravel() for pairs in np.meshgrid(np.arange(1.0, 41), np.arange(1.0, 41)))
    policy = with_shares(where, Policy(micro * count, micro), mode)
    fitting = fits(where, policy, mode)
    assume(fitting.any())
    found = search(where, mode)
    near = fitting & (np.asarray(estimate(where, policy, mode).gen_tok_s) >= 0.99 * found.estimate.gen_tok_s)
    for values, (least, most) in ((micro * count, found.batches), (micro, found.micro_batches)):
        assert least <= values[near].min(initial=least)
        assert most >= values[near].max(initial=most)
    assert found.batches[0] <= found.policy.batch <= found.batches[1]
    assert (
        found.plateau
        == ("plateau" in str(found))
        == any(b >= 1.25 * a for a, b in (found.batches, found.micro_batches))
    )


def test_a_plateau_is_told_and_a_peak_is_not():
    """Where the host's memory reads the KV cache all the time, more sequences bring nothing; a slow link wants more."""
    slow_host = small_machine(260, 400, 1e11, 1e9)
    assert search(Job(SMALL, slow_host, 200, 2)).plateau
    narrow = search(Job(SMALL, small_machine(90, 400, 1e8, 2e11), 200, 2))
    assert "plateau" not in str(narrow)
    assert narrow.batches[0] > 0.8 * narrow.batches[1]


def test_a_model_of_one_layer_needs_room_for_one():
    """Two slots for its weights would be more than the model has, and hide the policy that keeps it on the GPU."""
    single = Job(replace(SMALL, num_hidden_layers=1), small_machine(35, 400, 1e9, 1e10), 100, 100)
    for streamed in (0.0, 1.0):
        bare = single.dense_params * 2 + single.experts_bytes
        activations = max(gpu_peaks(single, Policy(1, 1, 0, 1, streamed), Mode.PAPER)) - bare
        assert 0 < activations < 0.1 * single.experts_bytes
    found = search(single, Mode.PAPER)
    assert found.policy.weights_on_gpu == 1
    assert found.estimate.gen_tok_s >= brute_force(single, Mode.PAPER) * (1 - 1e-9)


def test_search_drops_the_kv_buffers_where_all_of_the_cache_stays_on_the_gpu():
    machine = small_machine(173.8, 141.1, 4.73e9, 1.52e9)
    found = search(Job(SMALL, machine, 82, 250), Mode.PAPER)
    assert (found.policy.kv_on_gpu, found.policy.batch) == (1, 24)
    assert found.policy.weights_on_gpu < 1


def test_kv_buffers_are_needed_for_what_the_link_brings():
    where = job("s2", 77, 256)
    whole, most = (max(gpu_peaks(where, Policy(640, 64, 1, 1, 0, kv))) for kv in (1.0, 1 - 1e-12))
    assert most - whole == pytest.approx(2 * 64 * (77 + 256) * 4096)


def test_full_mode_counts_embedding_and_head_in_gpu_memory():
    where, policy = job("s2", 77, 256), Policy(640, 64)
    more = np.subtract(gpu_peaks(where, policy, Mode.FULL), gpu_peaks(where, policy, Mode.PAPER))
    assert more == pytest.approx(2 * 32000 * 4096 * 2)


WEIGHTS, KV, ATTENTION = 8 * 3 * 4096 * 14336 * 2, 4096, 2 * 4096 * (4096 + 1024)
"""Mixtral-8x7B by layer: experts [B], KV of a token [B], parameters of the attention."""


@pytest.mark.parametrize(
    ("mode", "policy", "expected"),
    [
        (Mode.PAPER, Policy(60, 20, 0, 1, 0.25), (0.75 * WEIGHTS / 1e9, 3 * WEIGHTS / 2e9, 60 * 150 * KV / 3e9, 0)),
        (
            Mode.PAPER,
            Policy(60, 25, 1, 1, 0, 0.5),
            ((WEIGHTS + 30 * 150 * KV) / 1e9, (3 * WEIGHTS + 60 * 150 * KV) / 2e9, 0, 0),
        ),
        (Mode.PAPER, Policy(60, 20, 0, 0), (0, 0, (3 * WEIGHTS + 60 * 150 * KV) / 3e9, 0)),
        (
            Mode.ARTIFACT,
            Policy(60, 20),
            (WEIGHTS / 1e9, (3 * WEIGHTS + 60 * 2 * 18432) / 2e9, 60 * (200 * KV + 4 * 4096) / 3e9, 0),
        ),
        (
            Mode.FULL,
            Policy(60, 20),
            (
                (WEIGHTS + 60 * 8192) / 1e9,
                (3 * WEIGHTS + 3 * 2 * ATTENTION) / 2e9,
                (60 * 150 * KV + 3 * WEIGHTS) / 3e9,
                60 * (8192 + KV) / 4e9,
            ),
        ),
        (
            Mode.FULL,
            Policy(60, 20, 1, 0, 0, 0.5),
            ((30 * 150 * KV + 60 * 8192) / 1e9, (60 * 150 * KV + 3 * 2 * ATTENTION) / 2e9, 3 * WEIGHTS / 3e9,
             60 * (8192 + KV / 2) / 4e9),
        ),
    ],
)  # fmt: skip
def test_a_layer_bound_by_memory_takes_its_bytes_over_the_bandwidths(mode, policy, expected):
    """Prompt 100, output 100, link 1, GPU 2, CPU 3 and way back 4 GB/s, all computing at no cost."""
    where = Job(MODEL, rated(flops=1e30), 100, 100)
    assert tuple(layer_time(where, policy, mode)) == pytest.approx(expected)


def rated(flops: float) -> Machine:
    gpu = Device("gpu", 1e12, 2e9 if flops > 1e20 else 1e30, (("bf16", flops),))
    cpu = Device("cpu", 1e12, 3e9 if flops > 1e20 else 1e30, (("fp32", flops),))
    return Machine("rated", gpu, cpu, Link(1e9, 4e9))


@pytest.mark.parametrize(
    ("mode", "policy", "gpu", "cpu"),
    [
        (Mode.PAPER, Policy(60, 20), 60 * 6 * 2 * 4096 * 14336, 60 * 4 * 32 * 128 * 150),
        (Mode.PAPER, Policy(60, 20, 1, 0), 60 * 4 * 32 * 128 * 150, 60 * 6 * 2 * 4096 * 14336),
        (Mode.ARTIFACT, Policy(60, 20), 60 * 6 * 2 * 4096 * 14336, 60 * (2 * 128 + 2) * 32 * 200),
        (Mode.FULL, Policy(60, 20), 60 * (6 * 2 * 4096 * 14336 + 2 * ATTENTION), 60 * 4 * 32 * 128 * 150),
    ],
)
def test_a_layer_bound_by_computing_takes_its_flops_over_the_rates(mode, policy, gpu, cpu):
    """Prompt 100, output 100, one GFLOP/s each, all memory free."""
    found = layer_time(Job(MODEL, rated(flops=1e9), 100, 100), policy, mode)
    assert (found.gpu, found.cpu) == pytest.approx((gpu / 1e9, cpu / 1e9))


def test_prefill_and_head_take_what_their_formula_says():
    where, policy = Job(MODEL, rated(flops=1e9), 100, 100), Policy(60, 20)
    active, vocabulary = ATTENTION + 2 * 3 * 4096 * 14336, 32000 * 4096
    head = 2 * vocabulary * 60 / 1e9
    scores = 2 * 32 * 128 * 100
    found = estimate(where, policy)
    assert found.prefill == pytest.approx(32 * 60 * 100 * (2 * active + scores) / 1e9 + head)
    assert found.step == pytest.approx(32 * found.layer.seconds + head)
    assert found.gen_tok_s == pytest.approx(60 * 100 / (found.prefill + 99 * found.step))
    over_the_link = Job(MODEL, rated(flops=1e30), 100, 100)
    layer = (0.5 * WEIGHTS + 60 * 100 * 8192) / 1e9, 3 * (WEIGHTS + 2 * ATTENTION) / 2e9
    found = estimate(over_the_link, policy._replace(weights_on_gpu=0.5))
    assert found.prefill == pytest.approx(32 * max(layer) + 3 * vocabulary * 2 / 2e9)


@given(
    small_jobs, st.sampled_from(Mode), st.integers(1, 50), st.integers(1, 20), st.booleans(), st.booleans(),
    st.floats(0, 1), st.floats(0, 1),
)  # fmt: skip
def test_a_layer_takes_longer_with_more_sequences_and_not_longer_with_more_in_gpu_memory(
    where, mode, micro, count, on_gpu, experts, weights, kv
):
    policy = Policy(micro * count, micro, int(on_gpu), int(experts), weights * experts, kv * on_gpu)
    base = layer_time(where, policy, mode).seconds
    assert layer_time(where, policy._replace(batch=micro * (count + 1)), mode).seconds >= base
    assert layer_time(where, policy._replace(weights_on_gpu=float(experts)), mode).seconds <= base
    assert layer_time(where, policy._replace(kv_on_gpu=float(on_gpu)), mode).seconds <= base
    faster = replace(where, machine=replace(where.machine, link=Link(1e12, 1e12)))
    assert layer_time(faster, policy, mode).seconds <= base


@given(small_jobs, st.sampled_from(Mode))
def test_arrays_give_what_their_numbers_give(where, mode):
    micro, count = np.array([1.0, 3, 7, 20]), np.array([4.0, 1, 9, 2])
    sides, shares = np.array([0, 0, 1, 1]), np.array([0, 0, 0.4, 1])
    many = Policy(micro * count, micro, sides, 1, np.array([0, 0.3, 0.5, 1]), shares)
    ones = [Policy(*(float(np.broadcast_to(value, 4)[i]) for value in many)) for i in range(4)]
    assert estimate(where, many, mode).gen_tok_s.tolist() == [estimate(where, one, mode).gen_tok_s for one in ones]
    peaks = [gpu_peaks(where, one, mode) for one in ones]
    assert np.transpose(gpu_peaks(where, many, mode)).tolist() == [list(pair) for pair in peaks]
    assert cpu_peak(where, many).tolist() == [cpu_peak(where, one) for one in ones]


def test_weights_and_kv_kept_on_the_gpu_leave_the_cpus_memory():
    where, policy = job("s2", 77, 32), Policy(640, 64, 1, 1)
    all_kv, all_weights = policy._replace(kv_on_gpu=1.0), policy._replace(weights_on_gpu=1.0)
    assert cpu_peak(where, policy) - cpu_peak(where, all_kv) == pytest.approx(640 * 109 * 131072)
    assert cpu_peak(where, policy) - cpu_peak(where, all_weights) == pytest.approx(34 * where.experts_bytes)
    moved = max(gpu_peaks(where, all_weights)) - max(gpu_peaks(where, policy))
    assert moved == pytest.approx(30 * where.experts_bytes)


@pytest.mark.parametrize("mode", Mode)
def test_searching_for_mixtral_on_a_t4_takes_less_than_two_seconds(mode):
    began = time.process_time()
    search(job("s1", 77, 128), mode)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Policy(4, 8), "micro_batch must be at least 1 and at most the batch"),
        (Policy(math.inf, 4), "batch must be finite; give sequences"),
        (Policy(8, 4, 0.5), "gpu_attention says where"),
        (Policy(8, 4, 0, 1, 1.5), "weights_on_gpu is a share"),
        (Policy(8, 4, 0, 1, 0.5, 0.5), "kv_on_gpu must be 0 where the CPU"),
        (Policy(8, 4, 0, 1, math.nan), "weights_on_gpu is a share"),
    ],
)
def test_a_policy_outside_the_domain_is_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        estimate(job("s1", 77, 32), policy)


@pytest.mark.parametrize("mode", ["full", "paper", True, None, Mode])
@pytest.mark.parametrize(
    "door",
    [
        lambda where, policy, mode: layer_time(where, policy, mode),
        lambda where, policy, mode: estimate(where, policy, mode),
        lambda where, policy, mode: gpu_peaks(where, policy, mode),
        lambda where, policy, mode: fits(where, policy, mode),
        lambda where, _, mode: search(where, mode),
        lambda where, policy, mode: with_shares(where, policy, mode),
        lambda where, policy, mode: least_weights(where, policy, mode),
        lambda where, _, mode: tensor_parallel(where, [1], mode),
        lambda where, _, mode: policy_map(where, 1e10, 1.0, mode),
    ],
)
def test_what_is_no_mode_is_refused_and_not_taken_as_the_papers(door, mode):
    with pytest.raises(ValueError, match=r"^mode must be Mode.FULL, Mode.PAPER or Mode.ARTIFACT, not .*; give one"):
        door(job("s1", 77, 32), Policy(8, 4), mode)


def test_a_job_outside_the_domain_is_refused():
    with pytest.raises(ValueError, match="output_len=1 has no decode step"):
        job("s1", 77, 1)
    with pytest.raises(ValueError, match="prompt_len=0"):
        job("s1", 0, 32)
    for lengths in ((math.inf, 32), (77, math.inf)):
        with pytest.raises(ValueError, match="_len=inf never ends; give tokens"):
            job("s1", *lengths)
    with pytest.raises(ValueError, match="dtype='fp8' is not computed in; give one of fp32, bf16, fp16"):
        Job(MODEL, small_machine(5, 100, 1e9, 1e10), 77, 32, "fp8")
    tiny = Job(SMALL, small_machine(5, 100, 1e9, 1e10), 400, 100)
    with pytest.raises(CapacityError, match="of CPU memory for one sequence"):
        search(tiny)
    with pytest.raises(CapacityError, match="does not fit into small"):
        least_weights(tiny, Policy(1, 1))


@pytest.mark.parametrize("given", ["a40", None, 7])
@pytest.mark.parametrize(("part", "kind"), [("model", "ModelConfig"), ("machine", "Machine")])
def test_a_job_is_of_a_model_and_a_machine_not_of_their_names(part, kind, given):
    words = rf"^Job\({part}=...\) must be a {kind}, not {given!r}; give one of wb.{part}s\[...\].$"
    with pytest.raises(ValueError, match=words):
        replace(job("s1", 77, 32), **{part: given})


def test_the_models_need_neither_torch_nor_matplotlib():
    heavy = {"torch", "numba", "matplotlib"}
    code = f"import sys, workbench.perfmodels.moe_lightning.policy_search; print({heavy} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert run.stdout.strip() == "set()", run.stderr
