"""MoE-Lens: its bound, its throughput by output length, and how its pipeline stalls for lack of KV memory.

Numbers are those of the project's specification, section 1.5 (Stage 2, block 16, sum from 0 to g, mean prompt) and
1.6; the paper prints throughput as pictures only, so its statements are tested as trends.
"""

import math

import pytest

from tests.systems import VSL
from workbench.hardware import machines
from workbench.memory import Memory
from workbench.models import models
from workbench.perfmodels import bound
from workbench.result import Result
from workbench.scenario import Scenario
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import VSLPipe
from workbench.serving import prepare
from workbench.simulate import simulate
from workbench.workload import Workload

MODEL, BLOCK = models["mixtral-8x7b"], 16


def scenario(prompt: int, output: int, requests: int, kv: str, machine=None) -> Scenario:
    return Scenario(
        VSL,
        model=MODEL,
        machine=machine or machines["a40"],
        memory=Memory(kv_capacity=kv, kv_block=BLOCK),
        workload=Workload.lengths(prompt, output, requests),
        scheduler=ResourceAware(),
    )


def roomy():
    """The A40 host with as much memory as any KV capacity needs."""
    from dataclasses import replace

    a40 = machines["a40"]
    return replace(a40, cpu=replace(a40.cpu, memory=1e15))


def exact_blocks(prompt: int, output: int) -> int:
    """S: block-iterations of one request, sum over i < g of ceil((p + i) / b)."""
    return sum(math.ceil((prompt + i) / BLOCK) for i in range(output))


def formula(case: Scenario, prompt: int, output: int) -> tuple[float, float]:
    """Both sides of min(N g / S, n_it g / (p + g - 1)) / delta in output tokens per second."""
    cost = prepare(case, VSLPipe()).cost
    delta = cost.weights_per_layer * MODEL.num_hidden_layers / case.machine.link.h2d
    memory = case.kv_blocks * output / exact_blocks(prompt, output) / delta
    gpu = cost.token_budget() * output / (prompt + output - 1) / delta
    return memory, gpu


@pytest.mark.parametrize("output", [64, 128, 256])
def test_short_of_kv_memory_the_bound_is_n_g_over_s_delta(output):
    case = scenario(98, output, 20_000, "70GB")
    memory, gpu = formula(case, 98, output)
    assert memory < gpu
    assert bound(case, VSLPipe()).binding == "h2d link"
    assert bound(case, VSLPipe()).gen_tok_s == pytest.approx(memory, rel=0.02)


@pytest.mark.parametrize("output", [32, 128])
def test_with_ample_kv_memory_the_bound_is_n_it_g_over_p_plus_g_minus_1_delta(output):
    case = scenario(98, output, 200_000, "4TB", roomy())
    memory, gpu = formula(case, 98, output)
    assert gpu < memory
    assert bound(case, VSLPipe()).binding == "gpu compute"
    assert bound(case, VSLPipe()).gen_tok_s == pytest.approx(gpu, rel=0.02)


@pytest.fixture(scope="module")
def at_70_gb() -> dict[int, Result]:
    """Simulations of MTBench at 70 GB by output length: 25000 requests at g=32, else 20000 (SPEC 1.5)."""
    return {g: simulate(scenario(98, g, 25_000 if g == 32 else 20_000, "70GB"), VSLPipe()) for g in (32, 64, 128, 256)}


@pytest.mark.parametrize(("output", "stage2"), [(32, 754), (64, 666), (128, 561), (256, 424)])
def test_simulated_throughput_at_70_gb_is_near_stage_2(at_70_gb, output, stage2):
    """Accuracy 1 - |predicted - simulated| / simulated: at least 85 % each for greedy admission (SPEC 1.6)."""
    simulated = at_70_gb[output].gen_tok_s
    assert 1 - abs(stage2 - simulated) / simulated >= 0.85


def test_mean_accuracy_at_70_gb_is_what_greedy_admission_reaches(at_70_gb):
    predicted = {32: 754, 64: 666, 128: 561, 256: 424}
    accuracy = [1 - abs(predicted[g] - r.gen_tok_s) / r.gen_tok_s for g, r in at_70_gb.items()]
    assert sum(accuracy) / len(accuracy) >= 0.94


def test_throughput_never_rises_with_the_output_length_at_70_gb(at_70_gb):
    """MoE-Lens section 8.1."""
    throughput = [at_70_gb[g].gen_tok_s for g in (32, 64, 128, 256)]
    assert throughput == sorted(throughput, reverse=True)


def stalled(result: Result) -> float:
    """Share of iterations without prefill, those after the last prefill left out of the count (SPEC 1.6)."""
    prefill = result.steps.prefill
    last = max(index for index, tokens in enumerate(prefill) if tokens)
    return sum(not tokens for tokens in prefill[:last]) / len(prefill)


def test_prefill_stalls_more_the_longer_the_outputs(at_70_gb):
    """MoE-Lens section 8.2: none to speak of at g=32, about half of the iterations at 64 and above."""
    share = {g: stalled(result) for g, result in at_70_gb.items()}
    assert share[32] <= 0.06
    assert share[256] > share[64] > share[32]
    assert 0.30 < share[64] < 0.50
    assert 0.43 < share[128] < 0.60


def test_throughput_peaks_at_128_output_tokens_at_210_gb():
    """MoE-Lens section 8.1: it rises, then drops, three times the KV memory of the line that only drops."""
    limits = {g: bound(scenario(98, g, 60_000, "210GB"), VSLPipe()).gen_tok_s for g in (32, 64, 128, 256)}
    assert limits[32] < limits[64] < limits[128] > limits[256]


@pytest.mark.slow
def test_simulated_throughput_rises_then_drops_at_210_gb():
    requests = {32: 63_831, 64: 45_000, 128: 45_000, 256: 30_000}
    simulated = {g: simulate(scenario(98, g, requests[g], "210GB"), VSLPipe()).gen_tok_s for g in requests}
    assert simulated[32] < simulated[64]
    assert simulated[256] < max(simulated.values())


def test_three_times_the_kv_memory_gives_three_times_the_memory_bound():
    small, large = (bound(scenario(98, 256, 60_000, kv), VSLPipe()).gen_tok_s for kv in ("70GB", "210GB"))
    assert large / small == pytest.approx(3, rel=0.02)


def test_a_layers_weights_take_about_five_seconds_in_all():
    """MoE-Lens section 8.2: 'about 5 s' per pass of 94 GB at 19.5 GB/s."""
    cost = prepare(scenario(98, 32, 10, "70GB"), VSLPipe()).cost
    assert 4.5 < cost.fetch(cost.weights_per_layer) * MODEL.num_hidden_layers < 5.3
