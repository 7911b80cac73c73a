"""Computation of MoE-CAP's printed values: sparsity of models, demands of targets, boxes of processors."""

from __future__ import annotations

from workbench.hardware.processors import processors
from workbench.models import models
from workbench.perfmodels import coverage, moe_cap
from workbench.perfmodels.moe_cap.diagram import Requirement, fits, requirement
from workbench.reproductions.rows import Inputs, Value, published


def _sparsity(given: Inputs) -> Value:
    """Parameters in 10^9, with the embeddings that model cards count; or a number of experts or layers."""
    model = models[given["model"]]
    sizes = {
        "total": model.params / 1e9,
        "active": (model.active_params + model.embedding_params) / 1e9,
        "experts": model.num_local_experts,
        "top_k": model.num_experts_per_tok,
    }
    return sizes[given["size"]]


def _expert(given: Inputs) -> Value:
    return models[given["model"]].expert_params / 1e9


def _active_share(given: Inputs) -> Value:
    model = models[given["model"]]
    return 100 * (model.active_params + model.embedding_params) / model.params


def _demand(given: Inputs) -> Value:
    """Bandwidth that DeepSeek-R1 needs, by the reading that both printed numbers share [GB/s]."""
    text = published("moe_cap")["bandwidth_against_power"]
    reading = text["reading"]
    params = given["active"] * 1e9 if "active" in given else models[text["model"]].params
    read = params * reading["bytes_per_parameter"], reading["addend"] * 1e9
    return float(moe_cap.required_bandwidth(*read, reading["tpot"])) / 1e9


def _power(given: Inputs) -> Value:
    return processors[given["processor"]].power


def _bandwidth(given: Inputs) -> Value:
    return processors[given["processor"]].bandwidth / 1e9


def _meets(given: Inputs) -> Value:
    """True if a processor has the bandwidth that the paper says DeepSeek-R1 needs."""
    needed = published("moe_cap")["bandwidth_against_power"][given["demand"]]
    return bool(processors[given["processor"]].bandwidth / 1e9 >= needed)


def _overestimate(given: Inputs) -> Value:
    return float(moe_cap.overestimate(given["total"], given["active"]))


def _layer_overestimate(given: Inputs) -> Value:
    """Excess of the bytes read if every expert of a layer is counted, for one sequence [%]."""
    model = models[given["model"]]
    layer = model.attention_params, model.expert_params
    whole, active = (
        moe_cap.activated_size(1, *layer, count) for count in (model.num_local_experts, model.num_experts_per_tok)
    )
    return 100 * float(moe_cap.overestimate(whole, active) - 1)


def _sibling(given: Inputs) -> Requirement:
    """Demand of a sibling of that size [GB], with more or fewer layers, for one sequence."""
    model = models[given["model"]]
    layers = given["gb"] * 1e9 / model.weight_bytes * model.num_hidden_layers
    share = model.num_experts_per_tok / model.num_local_experts
    return requirement(model, batch=1, context=0, tpot=given["tpot"], coverage=share, layers=layers)


def _stays_inside(given: Inputs) -> Value:
    return bool(fits(_sibling(given), processors[given["processor"]]).bandwidth)


def _leaves_at(given: Inputs) -> Value:
    """Size of a sibling from which on the processor's bandwidth does not suffice at the given S-MBU [GB]."""
    one, two = (_sibling({**given, "gb": size}) for size in (20, 40))
    box = given["smbu"] * processors[given["processor"]].bandwidth
    slope = (two.bandwidth - one.bandwidth) / (two.memory - one.memory)
    return float(one.memory + (box - one.bandwidth) / slope) / 1e9


def _practical(given: Inputs) -> Value:
    return float(moe_cap.practical(given["theoretical"], given["smbu"]))


def _bandwidth_suffices(given: Inputs) -> Value:
    """True if a perfect system would meet the target on bandwidth."""
    text = published("moe_cap")["measured_tpot"]
    model = models[given["model"]]
    share = coverage.uniform_coverage(given["batch"], experts=model.num_local_experts, top_k=model.num_experts_per_tok)
    needed = requirement(model, batch=given["batch"], context=text["context"], tpot=given["tpot"], coverage=share)
    return bool(fits(needed, processors[given["processor"]]).bandwidth)


def _operations_suffice(given: Inputs) -> Value:
    """True if a perfect system would meet the target on operations."""
    text = published("moe_cap")["measured_tpot"]
    model = models[given["model"]]
    needed = requirement(model, batch=given["batch"], context=text["context"], tpot=given["tpot"], coverage=1.0)
    return bool(fits(needed, processors[given["processor"]]).ops)


COMPUTE = {
    "cap.table1.total": _sparsity,
    "cap.table1.active": _sparsity,
    "cap.table1.experts": _sparsity,
    "cap.table1.top_k": _sparsity,
    "cap.expert": _expert,
    "cap.active": _active_share,
    "cap.fig2": _demand,
    "cap.power": _power,
    "cap.meets": _meets,
    "cap.fig3": _overestimate,
    "cap.fig6": _layer_overestimate,
    "cap.bandwidth": _bandwidth,
    "cap.fig5.fits": _stays_inside,
    "cap.fig5.leaves": _leaves_at,
    "cap.practical": _practical,
    "cap.fig7.theory": _bandwidth_suffices,
    "cap.fig8": _operations_suffice,
}
