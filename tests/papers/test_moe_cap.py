"""MoE-CAP: coverage, sparsity-aware utilisation per resource, demand against the hardware's box, price."""

import time
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core.catalogue import data_path
from workbench.hardware import machines
from workbench.hardware.processors import processors
from workbench.models import models
from workbench.perfmodels import coverage, moe_cap
from workbench.perfmodels.moe_cap import Placement, Resources
from workbench.perfmodels.moe_cap.diagram import fits, requirement
from workbench.perfmodels.moe_cap.processor_cost import cost_per_token, energy_rate, offloaded_bandwidth, purchase_rate

MIXTRAL = models["mixtral-8x7b"]
PUBLISHED = tomllib.loads(data_path("catalogue/published/moe_cap.toml").read_text(encoding="utf-8"))

routers = st.integers(1, 256).flatmap(lambda experts: st.tuples(st.just(experts), st.integers(1, experts)))
batches = st.floats(0, 4096)
shares = st.floats(0, 1)


# -- which experts a batch touches --------------------------------------------------------------------------------


@given(routers, batches, batches)
def test_uniform_coverage_rises_from_one_token_to_all_experts(router, one, other):
    experts, top_k = router
    few, many = sorted((one, other))
    low, high = coverage.uniform_coverage(np.array([few, many]), experts=experts, top_k=top_k)
    assert 0 <= low <= high <= 1
    assert coverage.uniform_coverage(1, experts=experts, top_k=top_k) == pytest.approx(top_k / experts)


@given(routers, st.floats(1, 2048), st.floats(0, 3), st.floats(0, 3))
def test_skew_lowers_coverage(router, tokens, one, other):
    experts, top_k = router
    mild, strong = sorted((one, other))
    even, skewed, more = (
        coverage.skewed_coverage(tokens, experts=experts, top_k=top_k, sigma=sigma) for sigma in (0.0, mild, strong)
    )
    assert more <= skewed + 1e-9
    assert skewed <= even + 1e-9
    assert even == pytest.approx(coverage.uniform_coverage(tokens, experts=experts, top_k=top_k), abs=1e-6)


def test_a_skewed_router_still_chooses_k_experts_per_token():
    assert coverage.skewed_coverage(1, experts=128, top_k=8, sigma=1.42) == pytest.approx(8 / 128)


def test_the_default_skew_fits_the_measured_table():
    batch = 2 ** np.arange(10)
    error = coverage.skewed_coverage(batch, experts=128, top_k=8) - coverage.measured_coverage(batch)
    assert np.sqrt(np.mean(error**2)) == pytest.approx(0.02, abs=0.001)


@given(st.floats(0, 5000), st.floats(0, 5000))
def test_measured_coverage_rises_and_ends_at_the_last_entry(one, other):
    few, many = sorted((one, other))
    low, high = coverage.measured_coverage(np.array([few, many]))
    assert 0 <= low <= high <= 0.98


def test_the_measured_table_comes_back_and_is_proportional_below_one_token():
    assert coverage.measured_coverage(np.array([1, 32, 512, 9999])).tolist() == pytest.approx(
        [0.0625, 0.547, 0.98, 0.98]
    )
    assert coverage.measured_coverage(np.array([0, 0.5])).tolist() == pytest.approx([0, 0.03125])
    assert coverage.measured_coverage(2**5.5) == pytest.approx((0.547 + 0.694) / 2)  # between 32 and 64 in log2


def test_a_trace_counts_distinct_experts_per_batch():
    trace = np.array([[[0, 1], [1, 0], [2, 3], [4, 5]], [[0, 1], [0, 1], [0, 1], [0, 1]]])
    assert coverage.traced_experts(trace, tokens=2, experts=8).tolist() == [3.0, 2.0]
    assert coverage.traced_experts(trace, tokens=4, experts=8).tolist() == [6.0, 2.0]
    assert coverage.traced_experts(trace, tokens=3, experts=8).tolist() == [4.0, 2.0]  # the fourth token is left out


def test_a_trace_of_uniform_routing_covers_what_the_formula_says():
    rng = np.random.default_rng(0)
    trace = np.argsort(rng.random((2, 4000, 16)), axis=2)[:, :, :2]
    seen = coverage.traced_experts(trace, tokens=8, experts=16) / 16
    assert seen == pytest.approx(coverage.uniform_coverage(8, experts=16, top_k=2), abs=0.01)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: coverage.uniform_coverage(-1, experts=8, top_k=2), "tokens must be at least 0 and finite, not -1"),
        (lambda: coverage.uniform_coverage(1, experts=8, top_k=9), "top_k must be at most the number of experts"),
        (lambda: coverage.skewed_coverage(1, experts=8, top_k=2, sigma=9), "sigma must be between 0 and 5, not 9"),
        (lambda: coverage.measured_coverage(np.nan), "tokens must be at least 0 and finite, not nan"),
        (lambda: coverage.traced_experts(np.zeros((2, 3)), tokens=1, experts=4), r"shape \(layers, tokens, k\)"),
        (lambda: coverage.traced_experts(np.full((1, 2, 1), 4), tokens=1, experts=4), "names experts 4 to 4 of 4"),
        (lambda: coverage.traced_experts(np.zeros((1, 2, 1), int), tokens=3, experts=4), "has no batch of 3"),
        (lambda: moe_cap.activated_bytes(MIXTRAL, 1.5), "coverage must be between 0 and 1"),
        (lambda: moe_cap.required_bandwidth(1, 1, 0), "tpot must be above 0 and finite, not 0"),
        (lambda: moe_cap.practical(1, 0), "utilisation must be above 0 and finite, not 0"),
        (lambda: moe_cap.practical(1, 1.5), "utilisation must be between 0 and 1, not 1.5"),
        # What is empty times what is endless is no number.
        (lambda: coverage.measured_coverage(np.inf), "tokens must be at least 0 and finite, not inf"),
        (lambda: moe_cap.activated_size(0, np.inf, 1, 1), "attention must be at least 0 and finite, not inf"),
        (lambda: moe_cap.kv_read_bytes(MIXTRAL, 0, np.inf), "context must be at least 0 and finite, not inf"),
        (
            lambda: moe_cap.required_ops(0, np.inf, 1, 1, 1, query_group=1),
            "active_params must be at least 0 and finite, not inf",
        ),
        (lambda: moe_cap.smfu(0, np.inf, 1), "flops_per_token must be at least 0 and finite, not inf"),
        (lambda: purchase_rate(np.inf, years=1), "price must be at least 0 and finite, not inf"),
        (lambda: moe_cap.overestimate(1, 2), "activated must be at most the total"),
        (lambda: Placement(weights_on_gpu=2), "weights_on_gpu must be between 0 and 1"),
        (lambda: Placement(gpu_experts="no"), "gpu_experts must be True or False, not 'no'; give True if the GPU"),
        (lambda: Placement(gpu_attention=0.5), "gpu_attention must be True or False, not 0.5"),
        (lambda: Placement(gpu_attention=None), "gpu_attention must be True or False, not None"),
        (lambda: purchase_rate(1, years=0), "years must be above 0"),
        (lambda: purchase_rate(np.nan, years=3), "price must be at least 0 and finite, not nan"),
        (
            lambda: offloaded_bandwidth(1, memory=1, bandwidth=1, link=np.nan),
            "link must be above 0 and finite, not nan",
        ),
    ],
)
def test_outside_its_domain_a_formula_says_what_it_expects(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# -- utilisation -------------------------------------------------------------------------------------------------


@given(shares, st.floats(0, 512), st.floats(0, 1e5), st.floats(1e-3, 10))
def test_smbu_is_at_most_the_ordinary_mbu(share, batch, context, tpot):
    kv = moe_cap.kv_read_bytes(MIXTRAL, batch, context)
    sparse = moe_cap.smbu(moe_cap.activated_bytes(MIXTRAL, share), kv, tpot, 2e12)
    assert sparse <= moe_cap.smbu(MIXTRAL.weight_bytes, kv, tpot, 2e12)


def test_flops_of_a_token_are_the_engines_and_grow_with_the_context_by_the_query_heads():
    assert moe_cap.token_flops(MIXTRAL, 0) == pytest.approx(models["mixtral-8x7b"].flops_per_token())
    scores = moe_cap.token_flops(MIXTRAL, 1000) - moe_cap.token_flops(MIXTRAL, 0)
    assert scores == 4 * 32 * 128 * 1000 * 32  # 4 H D per cached token and layer


@given(
    st.floats(0, 1), st.floats(0, 1), st.booleans(), st.booleans(), st.integers(1, 256), st.integers(0, 8192), shares
)
def test_work_goes_to_one_processor_or_the_other_and_what_crosses_the_link_was_in_dram(
    weights, kv, gpu_experts, gpu_attention, batch, context, share
):
    placement = Placement(weights, kv, gpu_experts, gpu_attention)
    need = moe_cap.step_demand(MIXTRAL, placement, batch=batch, context=context, coverage=share)
    assert need.gpu + need.cpu == pytest.approx(batch * moe_cap.token_flops(MIXTRAL, context))
    assert 0 <= need.link <= need.dram * (1 + 1e-12)
    read = moe_cap.activated_bytes(MIXTRAL, share) + moe_cap.kv_read_bytes(MIXTRAL, batch, context)
    assert need.hbm + need.dram - need.link == pytest.approx(read)
    if gpu_experts and gpu_attention:
        assert (need.cpu, need.hbm) == (0, pytest.approx(read))


def test_streaming_experts_on_the_a40_host_binds_the_link():
    placement = Placement(weights_on_gpu=0.0, kv_on_gpu=0.0, gpu_attention=False)
    need = moe_cap.step_demand(MIXTRAL, placement, batch=512, context=200, coverage=1.0)
    used = moe_cap.utilisation(need, Resources.of(machines["a40"]), tpot=MIXTRAL.routed_bytes / 19.5e9)
    assert used.link == pytest.approx(1.0)
    assert max(used.hbm, used.dram, used.gpu, used.cpu) < 1


# -- demand and the box ------------------------------------------------------------------------------------------


def demand(**changes):
    return requirement(MIXTRAL, **({"batch": 1, "context": 0, "tpot": 0.0125, "coverage": 0.25} | changes))


def test_the_full_mixtral_needs_more_bandwidth_than_an_a100_has_and_phi_at_40_gb_less_than_an_a6000():
    assert demand().bandwidth / 1e9 == pytest.approx(2040, rel=0.001)
    assert not fits(demand(), processors["a100-80gb-pcie"]).bandwidth
    phi = models["phi-3.5-moe"]
    layers = 40e9 / phi.weight_bytes * phi.num_hidden_layers
    small = requirement(phi, batch=1, context=0, tpot=0.0125, coverage=2 / 16, layers=layers)
    assert small.memory == pytest.approx(40e9, rel=0.02)
    assert fits(small, processors["rtx-a6000"]) == (True, True, True)


def test_a_sibling_of_all_layers_is_the_model_itself():
    assert demand(layers=32, batch=4, context=100) == demand(batch=4, context=100)
    assert demand().memory == MIXTRAL.weight_bytes


@given(st.floats(0.05, 1), st.floats(0.05, 1))
def test_practical_demand_is_never_below_theory_and_memory_is_the_same(smbu, smfu):
    theory, dashed = demand(), demand().practical(smbu=smbu, smfu=smfu)
    assert dashed.memory == theory.memory
    assert dashed.bandwidth >= theory.bandwidth
    assert dashed.ops >= theory.ops


@given(st.lists(st.integers(1, 512), min_size=1, max_size=5), st.floats(0, 1e4), st.floats(1e-3, 1))
def test_an_array_gives_what_its_numbers_give(batch, context, tpot):
    line = demand(batch=np.array(batch), context=context, tpot=tpot)
    points = [demand(batch=one, context=context, tpot=tpot) for one in batch]
    for field in ("memory", "bandwidth", "ops"):
        each = [float(getattr(point, field)) for point in points]
        assert np.broadcast_to(getattr(line, field), len(batch)).tolist() == pytest.approx(each)


# -- processors --------------------------------------------------------------------------------------------------


def test_every_number_of_a_demand_has_the_shape_of_all_arguments_together():
    line = requirement(MIXTRAL, batch=[1, 2], context=100, tpot=0.1, coverage=[[0.5], [0.6], [0.7]])
    assert np.shape(line.memory) == np.shape(line.bandwidth) == np.shape(line.ops) == (3, 2)
    verdict = fits(requirement(MIXTRAL, batch=1, context=0, tpot=[0.1, 0.2], coverage=1), processors["a100-80gb-pcie"])
    assert [edge.tolist() for edge in verdict] == [[False, False], [True, True], [True, True]]


def test_every_processor_has_its_source_and_rates():
    entries = tomllib.loads(data_path("catalogue/processors.toml").read_text(encoding="utf-8"))
    for name, entry in entries.items():
        assert entry["source"]["all"]
        assert "price" not in entry or entry["source"]["price"]
        assert processors[name].bandwidth > 0


@given(st.floats(1e9, 1e12), st.floats(1e9, 1e12), st.floats(1e11, 1e13), st.floats(1e9, 1e11))
def test_offloading_never_raises_bandwidth_and_costs_nothing_when_all_fits(weights, memory, bandwidth, link):
    rate = offloaded_bandwidth(weights, memory=memory, bandwidth=bandwidth, link=link)
    assert rate <= bandwidth * (1 + 1e-12)
    if weights <= memory:
        assert rate == pytest.approx(bandwidth)
    else:
        assert rate * (1 - memory / weights) <= link * (1 + 1e-9)


def test_price_is_amortised_and_energy_priced():
    year = 365.25 * 24 * 3600
    assert purchase_rate(1000, years=2) * 2 * year == pytest.approx(1000)
    assert energy_rate(1000, per_kwh=0.15) * 3600 == pytest.approx(0.15)
    both = cost_per_token(1000, 1000, 10, years=2, per_kwh=0.15)
    assert both == pytest.approx((purchase_rate(1000, years=2) + energy_rate(1000, per_kwh=0.15)) / 10)


def test_demands_of_the_whole_catalogue_are_computed_in_a_tenth_of_a_second():
    catalogue, boxes = dict(models), dict(processors)
    batch = 2 ** np.arange(8)
    began = time.process_time()
    for model in catalogue.values():
        share = coverage.uniform_coverage(batch, experts=model.num_local_experts, top_k=model.num_experts_per_tok)
        line = requirement(model, batch=batch, context=4000, tpot=0.25, coverage=share)
        for box in boxes.values():
            fits(line, box)
    assert time.process_time() - began < 0.1


def test_a_model_in_fewer_bytes_needs_less():
    head = MIXTRAL.head_bytes  # stays as it is
    quarter = moe_cap.activated_bytes(replace(MIXTRAL, expert_dtype="int4", other_dtype="int4"), 0.25) - head
    assert quarter == pytest.approx((moe_cap.activated_bytes(MIXTRAL, 0.25) - head) / 4)
