"""MoE-Lightning: its roofline, its optimiser's own answers, and a model nearer to its measurements than its own."""

import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.papers.hrm_cases import MODEL, PADDED, PUBLISHED, job
from workbench.errors import CapacityError, WorkloadError
from workbench.hardware import Device, Link, Machine, machines
from workbench.perf_plots_hrm import plot_policy_map, plot_roofline
from workbench.perfmodels.hrm import (
    balance_point,
    first_turning_point,
    local_performance,
    performance,
    second_turning_point,
)
from workbench.perfmodels.moe_lightning import Job, Mode, Policy, estimate, layer_time
from workbench.perfmodels.policy_memory import cpu_peak, cpu_room, fits, gpu_peaks
from workbench.perfmodels.policy_search import least_weights, policy_map, search, tensor_parallel, with_shares
from workbench.scheduler.token_balance import balance

OUTPUTS = PUBLISHED["mtbench"]["output_len"]
CELLS = [(setting, output) for setting in ("s1", "s2") for output in OUTPUTS]
rates = st.floats(1e9, 1e15)


# The hierarchical roofline


@given(rates, rates, rates)
def test_at_p1_both_levels_are_equally_fast_and_below_it_the_far_one_wins(flops, bandwidth, link):
    if link >= bandwidth:
        with pytest.raises(ValueError, match="no turning point P1"):
            first_turning_point(far_flops=flops, far_bandwidth=bandwidth, link=link)
        return
    point = first_turning_point(far_flops=flops, far_bandwidth=bandwidth, link=link)
    assert link * point == pytest.approx(local_performance(point, flops=flops, bandwidth=bandwidth))
    for side in (0.5, 2):
        stays = local_performance(side * point, flops=flops, bandwidth=bandwidth)
        assert (link * side * point < stays) == (side < 1)


@given(st.floats(0.01, 1e4), rates, rates, rates)
def test_performance_rises_up_to_p2_and_is_flat_beyond(intensity, flops, bandwidth, link):
    near = {"flops": flops, "bandwidth": bandwidth, "link": link}
    point = second_turning_point(intensity, **near)
    roof = local_performance(intensity, flops=flops, bandwidth=bandwidth)
    assert performance(intensity, point, **near) == pytest.approx(roof)
    assert performance(intensity, 0.5 * point, **near) == pytest.approx(roof / 2)
    assert performance(intensity, 2 * point, **near) == roof


@given(st.floats(0.01, 1e4), rates, rates)
def test_at_the_balance_point_link_and_memory_deliver_the_same(intensity, bandwidth, link):
    assert link * balance_point(intensity, bandwidth=bandwidth, link=link) == pytest.approx(bandwidth * intensity)
    bound_by_memory = {"flops": math.nextafter(bandwidth * intensity, math.inf), "bandwidth": bandwidth, "link": link}
    assert balance_point(intensity, bandwidth=bandwidth, link=link) == second_turning_point(
        intensity, **bound_by_memory
    )


def test_roofline_takes_arrays_and_refuses_what_is_outside():
    near = {"flops": 1e14, "bandwidth": 3e11, "link": np.array([1e10, 2e10])}
    both = performance(np.array([[1.0], [1000.0]]), 50.0, **near)
    assert both.tolist() == [
        [performance(intensity, 50.0, **(near | {"link": link})) for link in (1e10, 2e10)] for intensity in (1.0, 1e3)
    ]
    with pytest.raises(ValueError, match="flops=0"):
        local_performance(1.0, flops=0, bandwidth=1e9)
    with pytest.raises(ValueError, match="intensity=-1"):
        balance_point(-1.0, bandwidth=1e9, link=1e9)


def test_of_the_l4_plot_p2_is_at_600_flop_per_byte_and_9_6_tflops():
    plot = PUBLISHED["roofline"]
    near = {"flops": plot["gpu_flops"], "bandwidth": plot["gpu_bandwidth"]}
    intensity = plot["micro_batch"] * 2 / 8
    assert second_turning_point(intensity, **near, link=plot["link"]) == pytest.approx(600)
    assert local_performance(intensity, **near) == pytest.approx(9.6e12)


# What the public optimiser answers


def test_artifact_mode_gives_what_the_optimiser_printed():
    printed = PUBLISHED["policies"]["printed"]
    found = search(job("s2", 77, 32), Mode.ARTIFACT)
    assert (found.policy.micro_batch, found.policy.batch) == (324, 324 * 14)
    assert found.policy.weights_on_gpu == pytest.approx(printed["weights_on_gpu"], rel=1e-7)
    assert found.estimate.gen_tok_s == pytest.approx(printed["tok_s"], abs=0.01)
    assert found.estimate.layer.seconds == pytest.approx(printed["layer_s"], abs=5e-5)
    assert found.estimate.step == pytest.approx(printed["step_s"], abs=5e-4)
    assert found.gpu_peak / 2**30 == pytest.approx(printed["gpu_peak"], abs=5e-4)
    assert found.cpu_peak / 2**30 == pytest.approx(printed["cpu_peak"], abs=5e-4)
    assert found.estimate.layer.binding() == "link"


@pytest.mark.parametrize(("setting", "output"), CELLS)
def test_artifact_mode_gives_the_published_policies(setting, output):
    """S2 at 256 needs a GiB less of host memory than the README prints for 32: free memory at launch varies."""
    where = job(setting, 77, output)
    if (setting, output) == ("s2", 256):
        where = replace(where, machine=with_host_memory(where.machine, "183"))
    policy = search(where, Mode.ARTIFACT).policy
    micro, count = PUBLISHED["policies"][setting][OUTPUTS.index(output)]
    assert (policy.micro_batch, policy.batch) == (micro, micro * count)


def with_host_memory(machine: Machine, gibibytes: str) -> Machine:
    return replace(machine, cpu=replace(machine.cpu, memory=float(gibibytes) * 2**30))


@pytest.mark.parametrize(
    ("setting", "workload", "published"),
    [("s2", "synthetic", None), ("s1", "summarization", None), ("s1", "mtbench", (36, 14))],
)
def test_artifact_mode_gives_the_policies_of_tables_4_and_5(setting, workload, published):
    lengths = PUBLISHED[workload]
    output = 128 if workload == "mtbench" else lengths["output_len"]
    micro, count = published or lengths[setting]["policy"]
    policy = search(job(setting, lengths["padded_len"], output), Mode.ARTIFACT).policy
    assert (policy.micro_batch, policy.batch) == (micro, micro * count)


@pytest.mark.parametrize("output", OUTPUTS)
def test_two_to_four_gpus_scale_beyond_linear_in_the_optimisers_model_as_published(output):
    """Mixtral-8x22B, prompts padded. Its grid of micro-batches, 4 and then 36, is most of it: any mu gives under 2."""
    large = replace(
        MODEL, name="mixtral-8x22b", num_hidden_layers=56, hidden_size=6144, intermediate_size=16384,
        num_attention_heads=48,
    )  # fmt: skip
    where = Job(large, with_host_memory(job("s1", 77, 32).machine, "416"), 417, output, "fp16")
    two, four = tensor_parallel(where, (2, 4), Mode.ARTIFACT)
    place = OUTPUTS.index(output)
    measured = PUBLISHED["mtbench"]["s7"][PADDED][place] / PUBLISHED["mtbench"]["s6"][PADDED][place]
    assert four / two > 2
    assert measured > 2
    two, four = tensor_parallel(where, (2, 4), Mode.PAPER)
    assert 1 < four / two < 2


# Against what was measured


def predictions(setting: str, output: int) -> dict[str, float]:
    """At the published policy: measured, the paper's model with its assumed rates, ours with measured ones [tok/s]."""
    place, data = OUTPUTS.index(output), PUBLISHED["mtbench"]
    policy = PUBLISHED["policies"][setting][place]
    return {"measured": data[setting]["MoE-Lightning"][place]} | at_policy(setting, policy, data["prompt_len"], output)


def at_policy(setting: str, policy: list[int], prompt: int, output: int) -> dict[str, float]:
    """Predictions by mode; FULL with measured rates and the others with assumed ones, unless the name says so."""
    micro, count = policy
    assumed = job(setting, prompt, output)
    measured = replace(assumed, machine=machines[f"moe-lightning-{setting}"])
    chosen = with_shares(assumed, Policy(micro * count, micro), Mode.ARTIFACT)
    asked = {
        "artifact": (assumed, Mode.ARTIFACT),
        "paper": (assumed, Mode.PAPER),
        "full": (measured, Mode.FULL),
        "full, assumed rates": (assumed, Mode.FULL),
        "paper, measured rates": (measured, Mode.PAPER),
    }
    return {name: float(estimate(where, chosen, mode).gen_tok_s) for name, (where, mode) in asked.items()}


@pytest.mark.parametrize(("setting", "output"), CELLS)
@pytest.mark.parametrize("theirs", ["artifact", "paper"])
def test_full_mode_is_nearer_to_the_measurement_than_the_papers_model(setting, output, theirs):
    """As a difference and as a factor, so that neither too high nor too low is favoured."""
    found = predictions(setting, output)
    assert abs(found["full"] - found["measured"]) < abs(found[theirs] - found["measured"])
    assert abs(math.log(found["full"] / found["measured"])) < abs(math.log(found[theirs] / found["measured"]))


def test_full_mode_errs_by_less_than_40_percent_in_each_cell_and_30_in_the_mean():
    """Repeated runs differ by about 30 %, see data/."""
    found = [predictions(*cell) for cell in CELLS]
    errors = [abs(one["full"] / one["measured"] - 1) for one in found]
    assert max(errors) < 0.40
    assert sum(errors) / len(errors) < 0.30


@pytest.mark.parametrize(("setting", "output"), CELLS)
def test_what_full_mode_adds_helps_with_the_same_assumed_rates(setting, output):
    found = predictions(setting, output)
    assert found["measured"] < found["full, assumed rates"] < found["artifact"]


def test_what_full_mode_adds_helps_in_the_mean_with_the_same_measured_rates():
    """Not in each cell: where decode takes nearly all the time, both models are the measured link and little else."""
    found = [predictions(*cell) for cell in CELLS]
    full, paper = (
        sum(abs(one[name] / one["measured"] - 1) for one in found) for name in ("full", "paper, measured rates")
    )
    assert full < 0.6 * paper


@pytest.mark.parametrize("setting", ["s1", "s2"])
@pytest.mark.parametrize("workload", ["synthetic", "summarization"])
def test_full_mode_is_nearer_on_helm_too(setting, workload):
    """Settings that had no part in choosing what FULL adds."""
    data = PUBLISHED[workload]
    measured = data[setting][PADDED]
    found = at_policy(setting, data[setting]["policy"], data["padded_len"], data["output_len"])
    assert abs(math.log(found["full"] / measured)) < abs(math.log(found["artifact"] / measured))


@pytest.mark.parametrize("output", OUTPUTS)
def test_what_full_mode_adds_costs_time(output):
    where = job("s2", 77, output)
    policy = search(where, Mode.PAPER).policy
    plain, full = (estimate(where, policy, mode) for mode in (Mode.PAPER, Mode.FULL))
    assert all(more > less for more, less in zip(full.layer, plain.layer, strict=True))
    assert full.prefill > 0 == plain.prefill
    assert full.gen_tok_s < plain.gen_tok_s


# The cost model and the search

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


@settings(max_examples=15, deadline=None)
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


@settings(deadline=None)
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


@settings(deadline=None)
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
        (Policy(8, 4, 0.5), "gpu_attention says where"),
        (Policy(8, 4, 0, 1, 1.5), "weights_on_gpu is a share"),
        (Policy(8, 4, 0, 1, 0.5, 0.5), "kv_on_gpu must be 0 where the CPU"),
        (Policy(8, 4, 0, 1, math.nan), "weights_on_gpu is a share"),
    ],
)
def test_a_policy_outside_the_domain_is_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        estimate(job("s1", 77, 32), policy)


def test_a_job_outside_the_domain_is_refused():
    with pytest.raises(ValueError, match="output_len=1 has no decode step"):
        job("s1", 77, 1)
    with pytest.raises(ValueError, match="prompt_len=0"):
        job("s1", 0, 32)
    tiny = Job(SMALL, small_machine(5, 100, 1e9, 1e10), 400, 100)
    with pytest.raises(CapacityError, match="of CPU memory for one sequence"):
        search(tiny)
    with pytest.raises(CapacityError, match="does not fit into small"):
        least_weights(tiny, Policy(1, 1))


def test_the_models_need_neither_torch_nor_matplotlib():
    code = "import sys, workbench.perfmodels.policy_search; print({'torch', 'numba', 'matplotlib'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert run.stdout.strip() == "set()", run.stderr


# Policy maps


@pytest.fixture(scope="module")
def two_a100s() -> Job:
    """The machine of Fig. 10, its GPUs at half of their peak rates."""
    data = PUBLISHED["fig10"]
    gpu = Device("A100", data["gpu_memory"], data["gpu_bandwidth"] / 2, (("bf16", data["gpu_flops"] / 2),))
    cpu = Device("host", data["cpu_memory"], data["cpu_bandwidth"], (("fp32", data["cpu_flops"]),))
    machine = Machine("2 x A100", gpu, cpu, Link(1e11, 1e11))
    return Job(MODEL, machine, data["prompt_len"], data["output_len"], gpus=data["gpus"])


@pytest.fixture(scope="module")
def fig10(two_a100s):
    return policy_map(two_a100s, np.array(PUBLISHED["fig10"]["links"]), np.array([1.0, 4, 10]))


def test_the_cpu_gets_the_attention_only_where_it_is_strong(fig10):
    assert (fig10.gpu_attention[0] == 1).all()
    assert (fig10.gpu_attention[-1] == 0).all()
    assert (np.diff(fig10.gpu_attention, axis=0) <= 0).all()
    assert (fig10.gpu_experts == 1).all()


def test_with_a_faster_link_less_stays_on_the_gpu(fig10):
    weak_host = fig10.weights_on_gpu[0]
    assert (np.diff(weak_host) <= 0.005).all()
    assert weak_host[-1] < 0.9 * weak_host[0]
    assert (np.diff(fig10.kv_on_gpu[0]) <= 0.005).all()


def test_throughput_never_falls_with_a_better_machine(fig10):
    assert (np.diff(fig10.gen_tok_s, axis=0) >= -0.01 * fig10.gen_tok_s[:-1]).all()
    assert (np.diff(fig10.gen_tok_s, axis=1) >= -0.01 * fig10.gen_tok_s[:, :-1]).all()


def test_least_weights_fall_with_the_link_and_cost_nothing(two_a100s):
    """While the experts bind, the link may take as long: r_w = 1 - T_gpu B / W; then host memory asks for some."""
    host = replace(two_a100s.machine.cpu, bandwidth=1e13, flops=(("fp32", 1e15),))
    policy, found = Policy(1024, 128, 0, 1, 0.8), []
    for link in (1e11, 2e11, 5e11):
        where = replace(two_a100s, machine=replace(two_a100s.machine, cpu=host, link=Link(link, link)))
        found.append(least_weights(where, policy, Mode.PAPER))
        speeds = [
            estimate(where, policy._replace(weights_on_gpu=share), Mode.PAPER).gen_tok_s for share in (found[-1], 0.8)
        ]
        assert speeds[0] == pytest.approx(speeds[1], rel=1e-6)
    gpu = layer_time(where, policy, Mode.PAPER).gpu
    assert found[:2] == pytest.approx([1 - gpu * link / WEIGHTS for link in (1e11, 2e11)], abs=1e-5)
    assert cpu_peak(where, policy._replace(weights_on_gpu=found[2])) == pytest.approx(cpu_room(where), rel=1e-5)


def test_maps_refuse_machines_that_do_not_exist(two_a100s):
    with pytest.raises(ValueError, match="links has 0"):
        policy_map(two_a100s, np.array([0.0]), 1.0)


def test_pictures_are_drawn_from_the_maps_values(fig10):
    ax = plot_policy_map(fig10)
    red = ax.collections[1].get_offsets()
    assert len(red) == (fig10.gpu_attention == 0).sum()
    assert np.allclose(ax.collections[0].get_array(), fig10.weights_on_gpu)
    plt.close(ax.figure)
    roofs = plot_roofline(machines["moe-lightning-s2-optimiser"], 32, "fp16")
    assert [text.get_text() for text in roofs.texts] == [" P1", " P2"]
    plt.close(roofs.figure)


# Algorithm 2

lengths = st.lists(st.integers(1, 100), max_size=40)


@given(lengths, st.integers(1, 6), st.integers(1, 8), st.integers(1, 20), st.integers(0, 300))
def test_every_request_is_in_one_micro_batch_or_waits(prompts, batches, size, output, spare):
    cache = 120 + spare
    found = balance(prompts, micro_batches=batches, size=size, output_len=output, cache=cache)
    placed = [request for batch in found.micro_batches for request in batch]
    assert sorted(placed + found.aborted) == list(range(len(prompts)))
    assert len(found.micro_batches) <= batches
    for batch in found.micro_batches:
        assert 0 < len(batch) <= size
        assert sum(prompts[request] for request in batch) + len(batch) * output <= cache
        assert [prompts[request] for request in batch] == sorted((prompts[r] for r in batch), reverse=True)


def test_token_counts_of_micro_batches_differ_by_at_most_the_longest_prompt():
    prompts = np.random.default_rng(0).integers(1, 400, 60).tolist()
    found = balance(prompts, micro_batches=4, size=60, output_len=1, cache=10**6)
    sums = [sum(prompts[request] for request in batch) for batch in found.micro_batches]
    assert found.aborted == []
    assert max(sums) - min(sums) <= max(prompts)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"cache": 9}, "never fits"), ({"size": 0}, "size=0"), ({"micro_batches": 0}, "micro_batches=0")],
)
def test_a_request_that_could_never_be_placed_is_an_error(changed, message):
    asked = {"micro_batches": 2, "size": 3, "output_len": 4, "cache": 20} | changed
    with pytest.raises(WorkloadError, match=message):
        balance([6, 3], **asked)
