"""KTransformers: what deferral does to a layer and to the model, and how fast three models run on its machines."""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.hardware.processors import Processor, ProcessorKind
from workbench.models import models
from workbench.perfmodels import ktransformers as kt
from workbench.perfmodels.ktransformers import Kernel, LayerTimes
from workbench.perfmodels.ktransformers.hybrid_speed import (
    Numa,
    decode_layer,
    decode_speed,
    numa_bandwidth,
    prefill_speed,
)
from workbench.reproductions.ktransformers import in_bytes, machine, profile
from workbench.reproductions.rows import published

TEXT = published("ktransformers")
HOST, LAYER, DEFERRAL = (TEXT[part] for part in ("host", "layer", "deferral"))
PROFILE = profile()
NAMES = list(DEFERRAL["deferred_bf16"])


A100, RTX4080 = (machine(gpu) for gpu in HOST["gpus"])

amounts = st.floats(0, 10)
layers = st.builds(LayerTimes, attention=amounts, shared=amounts, routed=st.floats(0.01, 10), sync=amounts)
deferrals = st.integers(2, 16).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k - 1)))


# -- one layer ---------------------------------------------------------------------------------------------------


@given(layers, deferrals)
def test_deferral_never_slows_a_layer_and_no_processor_is_more_than_busy(times, choice):
    top_k, deferred = choice
    every = kt.layer_time(times, np.arange(top_k), top_k=top_k)
    assert np.all(np.diff(every) <= 1e-12)
    assert every[-1] >= times.routed
    assert float(kt.layer_time(times, deferred, top_k=top_k)) == every[deferred]
    cpu, gpu = kt.layer_utilisation(times, deferred, top_k=top_k)
    assert 0 < cpu <= 1
    assert 0 <= gpu <= 1


@given(layers, st.integers(3, 16))
def test_the_fewest_deferred_experts_saturate_the_cpu_unless_two_must_stay(times, top_k):
    hidden, one = times.attention + times.sync, times.routed / top_k
    count = int(kt.experts_to_defer(hidden, one, top_k=top_k))
    assert 0 <= count <= top_k - 2
    # Without shared experts the immediate ones are all that attention waits for.
    lean = replace(times, shared=0.0)
    time = float(kt.layer_time(lean, count, top_k=top_k))
    if count < top_k - 2:
        assert time == pytest.approx(lean.routed)
    if count > 0 and hidden / one % 1 > 1e-6:
        assert float(kt.layer_time(lean, count - 1, top_k=top_k)) > lean.routed


@given(layers, deferrals, st.integers(1, 60))
def test_a_timeline_keeps_lanes_and_dependencies(times, choice, count):
    top_k, deferred = choice
    line = kt.decode_timeline(times, count, deferred=deferred, top_k=top_k)
    for lane in ("gpu", "cpu"):
        spans = [span for span in line if span.lane == lane]
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(spans))
    at = {span.name: span for span in line}
    for layer in range(1, count):
        assert at[f"A {layer}"].start >= at[f"I {layer - 1}"].end
        if layer > 1 and deferred:
            assert at[f"A {layer}"].start >= at[f"D {layer - 2}"].end
    assert f"D {count - 1}" not in at
    cpu = sum(span.end - span.start for span in line if span.lane == "cpu")
    assert cpu == pytest.approx(count * times.routed)


@given(layers, deferrals)
def test_layers_of_a_long_timeline_take_what_the_formula_says(times, choice):
    top_k, deferred = choice
    short, long = (kt.decode_timeline(times, n, deferred=deferred, top_k=top_k).end for n in (40, 80))
    assert (long - short) / 40 == pytest.approx(float(kt.layer_time(times, deferred, top_k=top_k)), rel=1e-6, abs=1e-9)


def test_the_whole_chain_of_deepseek_v3_gains_a_little_less_than_a_layer():
    """The first attention and the last layer overlap with nothing."""
    plain, deferred = (kt.decode_timeline(PROFILE, 58, deferred=d, top_k=8) for d in (0, 3))
    assert 1 - deferred.end / plain.end == pytest.approx(0.255, abs=0.001)
    busy = sum(span.end - span.start for span in deferred if span.lane == "cpu")
    assert busy / deferred.end == pytest.approx(0.994, abs=0.001)


# -- what the model computes -------------------------------------------------------------------------------------

chains = st.integers(1, 5).flatmap(
    lambda count: st.lists(st.lists(st.floats(-1, 1), min_size=4, max_size=4), min_size=count, max_size=count)
)


def chain(weights):
    shared = [lambda x: 0.5 * x] * len(weights)
    experts = [[lambda x, w=w: w * x for w in row] for row in weights]
    return shared, experts


@given(chains, st.floats(-2, 2))
def test_nothing_deferred_is_the_ordinary_model_bit_for_bit(weights, start):
    outputs, hidden = kt.deferral_outputs(start, *chain(weights), deferred=0), start
    for row, output in zip(weights, outputs, strict=True):
        expected = hidden + 0.5 * hidden
        for weight in row:
            expected = expected + weight * hidden
        assert output == expected
        hidden = output


@pytest.mark.parametrize("number", [int, float, np.int64, np.float64])
def test_whole_numbers_of_experts_may_be_of_any_type(number):
    two, eight = number(2), number(8)
    assert kt.layer_time(PROFILE, two, top_k=eight) == kt.layer_time(PROFILE, 2, top_k=8)
    assert kt.experts_to_defer(1, 1, top_k=eight) == 1
    assert kt.decode_timeline(PROFILE, two, deferred=two, top_k=eight) == kt.decode_timeline(
        PROFILE, 2, deferred=2, top_k=8
    )
    layers = chain([[0.4, 0.3, 0.2, 0.1]] * 2)
    assert kt.deferral_outputs(1.0, *layers, deferred=two) == kt.deferral_outputs(1.0, *layers, deferred=2)


@given(st.lists(st.floats(-1, 1), min_size=4, max_size=4), st.integers(0, 3))
def test_a_single_layer_defers_nothing(row, deferred):
    every = [kt.deferral_outputs(1.0, *chain([row]), deferred=d) for d in (0, deferred)]
    assert every[0] == every[1]


def test_a_deferred_expert_sees_its_own_layers_input_and_arrives_one_layer_later():
    weights = [[0.4, 0.3, 0.2, 0.1]] * 3
    outputs = kt.deferral_outputs(np.ones(2), *chain(weights), deferred=1)
    assert outputs[0] == pytest.approx(2.4 * np.ones(2))
    assert outputs[1] == pytest.approx(5.86 * np.ones(2))


# -- kernels and sockets -----------------------------------------------------------------------------------------


def test_four_tokens_per_expert_are_for_vectors_and_five_for_tiles():
    assert [kt.choose_kernel(n).kernel for n in (0, 4, 5)] == [Kernel.VECTOR, Kernel.VECTOR, Kernel.TILE]
    assert kt.choose_kernel(np.array([1, 4, 4.5, 64])).tile.tolist() == [False, False, True, True]


@given(st.integers(1, 256).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e))))
def test_the_switch_is_the_first_prompt_whose_mean_is_four(router):
    experts, top_k = router
    prompt = kt.switch_prompt(experts, top_k)
    assert prompt * top_k / experts >= 4 - 1e-9
    assert (prompt - 1) * top_k / experts < 4


def test_switches_of_the_three_models():
    counts = [kt.switch_prompt(models[name].num_local_experts, models[name].num_experts_per_tok) for name in NAMES]
    assert counts == [128, 107, 32]


@given(st.integers(1, 4), st.floats(1e9, 1e12), st.floats(0.01, 1), st.integers(1, 16))
def test_slices_on_every_socket_are_the_fastest_option(sockets, local, share, top_k):
    rate = {
        numa: float(numa_bandwidth(numa, sockets=sockets, local=local, remote=share * local, top_k=top_k))
        for numa in Numa
    }
    best = rate[Numa.TENSORS]
    assert best == pytest.approx(sockets * local)
    assert all(value <= best * (1 + 1e-9) for value in rate.values())
    assert rate[Numa.EXPERTS] >= rate[Numa.SINGLE] * (1 - 1e-9)
    if sockets == 1:
        assert all(value == pytest.approx(local) for value in rate.values())


def test_the_busiest_of_two_sockets_has_the_expected_share_of_experts():
    """Eight fair coins: 4 + 8 C(8, 4) / 2^9 / 2 on the larger side."""
    rate = numa_bandwidth(Numa.EXPERTS, sockets=2, local=1.0, remote=0.5, top_k=8)
    assert 8 / rate == pytest.approx(4 + 8 * 70 / 2**9)


# -- speed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [8, 160, 256, 1000])
def test_the_busiest_of_two_sockets_however_many_experts_are_chosen(top_k):
    """Against the expected count in exact fractions."""
    ways = sum(max(count, top_k - count) * math.comb(top_k, count) for count in range(top_k + 1))
    rate = numa_bandwidth(Numa.EXPERTS, sockets=2, local=1.0, remote=0.5, top_k=top_k)
    assert rate == pytest.approx(float(Fraction(top_k * 2**top_k, ways)))


def test_the_calibrated_layer_predicts_its_shared_experts():
    """Attention set the GPU's efficiency; the shared expert was not used for it and comes out within 7 %."""
    times = decode_layer(in_bytes(LAYER["model"], 2.0), A100)
    assert times.shared / times.attention == pytest.approx(PROFILE.shared / PROFILE.attention, rel=0.07)
    assert 0.3 < A100.gpu_efficiency < 0.5
    assert 0.7 < A100.cpu_efficiency < 0.8


@pytest.mark.parametrize("name", NAMES)
def test_speeds_rise_with_deferral_and_fall_with_context(name):
    model = in_bytes(name, 2.0)
    speeds = decode_speed(model, A100, deferred=np.arange(model.num_experts_per_tok))
    assert np.all(np.diff(speeds) >= 0)
    assert decode_speed(model, A100, context=4096) < decode_speed(model, A100)
    one_socket = replace(A100, numa=Numa.SINGLE)
    assert decode_speed(model, one_socket) < decode_speed(model, A100)


@pytest.mark.parametrize("name", NAMES)
def test_prefill_gets_faster_per_token_as_prompts_fill_the_experts(name):
    model = in_bytes(name, 2.0)
    speeds = prefill_speed(model, A100, np.array([32, 256, 2048]))
    assert np.all(np.diff(speeds) > 0)
    assert speeds[0] == pytest.approx(prefill_speed(model, A100, 32))


@pytest.mark.parametrize("length", [100, 256, 4096])
def test_prefill_attends_to_every_earlier_token_within_the_window(length):
    model = models["gpt-oss-20b"]
    unseeing = replace(model, sliding_window=0, windowed_layers=model.num_hidden_layers, layers=())
    slow = replace(A100, gpu=Processor("slow", ProcessorKind.GPU, bandwidth=1e30, flops=1e9))
    seconds, without = (length / prefill_speed(one, slow, length) for one in (model, unseeing))
    pairs = sum(model.attended(context) for context in range(1, length + 1))
    scores = 2.0 * pairs * model.pair_macs * model.num_hidden_layers / 1e9
    assert seconds - without == pytest.approx(scores)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: kt.layer_time(PROFILE, 8, top_k=8), "deferred must be between 0 and 7, not 8"),
        (lambda: LayerTimes(1, 1, 0, 1), "routed must be above 0"),
        (lambda: LayerTimes(math.inf, 1, 1, 1), "attention must be at least 0 and finite, not inf"),
        (lambda: kt.layer_time(PROFILE, 1.5, top_k=8), "deferred must be a whole number from 0, not 1.5; give experts"),
        (lambda: kt.layer_time(PROFILE, [0, 0.5], top_k=8), "deferred must be a whole number from 0, not 0.5"),
        (lambda: kt.time_reduction(PROFILE, 1.5, top_k=8), "deferred must be a whole number from 0, not 1.5"),
        (lambda: kt.layer_utilisation(PROFILE, 1.5, top_k=8), "deferred must be a whole number from 0, not 1.5"),
        (lambda: kt.decode_timeline(PROFILE, 4, deferred=1.5, top_k=8), "deferred must be a whole number from 0"),
        (lambda: kt.deferral_outputs(1, *chain([[1, 1]]), deferred=0.5), "deferred must be a whole number from 0"),
        (lambda: kt.experts_to_defer(1, 1, top_k=1), "top_k must be a whole number from 2, not 1"),
        (lambda: kt.experts_to_defer(1, 1, top_k=2.5), "top_k must be a whole number from 2, not 2.5; give the exp"),
        (lambda: kt.experts_to_defer(1, 1, top_k=[8, 2.5]), "top_k must be a whole number from 2, not 2.5"),
        (lambda: kt.end_to_end_speedup(1.0, 0.0), "time that is left must be above 0 and finite, not 0"),
        (lambda: kt.end_to_end_speedup(1.5, 0.1), "reduction must be between 0 and 1, not 1.5"),
        (lambda: kt.deferral_outputs(1, [], [], deferred=0), "must name the same layers"),
        (lambda: kt.decode_timeline(PROFILE, 0, deferred=0, top_k=8), "layers must be a whole number from 1"),
        (
            lambda: kt.decode_timeline(PROFILE, 2.5, deferred=0, top_k=8),
            "layers must be a whole number from 1, not 2.5",
        ),
        (lambda: kt.choose_kernel(-1), "tokens_per_expert must be at least 0"),
        (lambda: kt.switch_prompt(4, 5), "top_k must be at most the number of experts"),
        (lambda: kt.layer_time(PROFILE, 0, top_k=0), "top_k must be a whole number from 1, not 0"),
        (lambda: kt.decode_timeline(PROFILE, 4, deferred=0, top_k=0), "top_k must be a whole number from 1, not 0"),
        (lambda: A100.calibrated(models["deepseek-v3"], LayerTimes(0, 1, 1, 1)), "attention must be above 0"),
        (lambda: numa_bandwidth(Numa.SINGLE, sockets=0, local=1, remote=1, top_k=1), "sockets must be at least 1"),
        (lambda: prefill_speed(models["mixtral-8x7b"], A100, 0), "prompt must be at least 1"),
    ],
)
def test_outside_its_domain_a_formula_says_what_it_expects(call, words):
    with pytest.raises(ValueError, match=words):
        call()
