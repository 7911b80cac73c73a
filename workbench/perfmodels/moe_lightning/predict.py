"""MoE-Lightning's model as a reader: its prediction for a scenario that `bound`, `simulate` and `run` also read."""

from __future__ import annotations

import math

from workbench.core.errors import ScenarioError
from workbench.core.result import Result, Source
from workbench.perfmodels.domain import all_at_once
from workbench.perfmodels.moe_lightning.model import Job, Mode, Policy, estimate
from workbench.scenario import Scenario
from workbench.schedules.base import Schedule
from workbench.serving import prepare
from workbench.serving.prepared import facts
from workbench.stages import Place, Stage, attention, combine, kv, out_proj, qkv, route, shared_experts
from workbench.stages import experts as routed
from workbench.workload import UNIFORM


def predict(scenario: Scenario, schedule: Schedule) -> Result:
    """Throughput that MoE-Lightning's model, in FULL mode, predicts for this pipeline and memory.

    The policy follows from the scenario: A_g and F_g from the devices of decode attention and experts, r_w and r_c from
    the tensors that are streamed, N from the KV cache (at most all requests), mu from the number of the schedule's
    parts.

    Returns
    -------
    Result
        A result with source PREDICTED; `busy` has the time of decode by lane [s].

    Raises
    ------
    ScenarioError
        If requests arrive one after the other, weights and KV have different precisions, outputs have one token, or the
        pipeline has operations that the model does not know, defers experts or has no experts.

    Notes
    -----
    MoE-Lightning, Eqs 12 to 14 and what FULL adds. Batches of N equal requests of mean lengths follow one another
    without overlap: this model has neither the continuous admission of the other readers nor streaming of the
    attention's weights. Of the schedule only the number of its parts counts: overlap is taken to be perfect.
    """
    prepared = prepare(scenario, schedule)
    workload = scenario.workload.as_served
    precision = scenario.precision
    all_at_once("moe_lightning.predict", workload)
    prompt = float(workload.prompt_len.mean())
    output = float(workload.output_len.mean())
    if len({precision.weights, precision.kv, precision.experts, precision.others} - {None}) > 1:
        raise ScenarioError(
            f"moe_lightning.predict has one precision, not weights in {scenario.weight_formats} and KV in "
            f"{precision.kv}; give Memory(weights=..., kv=...) the same."
        )
    if output < 2:
        raise ScenarioError("moe_lightning.predict is about decode, but outputs have one token; give longer outputs.")
    held = scenario.kv_blocks * scenario.memory.kv_block
    policy = _policy(scenario, min(len(workload.prompt_len), int(held // (prompt + output))), schedule.parts)
    found = estimate(Job(scenario.model, scenario.machine, prompt, output, precision.weights), policy, Mode.FULL)
    generated = int(workload.output_len.sum())
    rounds = len(workload.prompt_len) / float(policy.batch)
    layers_decoded = rounds * (output - 1) * scenario.model.num_hidden_layers
    lanes = zip(("h2d", "gpu", "cpu", "d2h"), found.layer, strict=True)
    return Result(
        source=Source.PREDICTED,
        schedule=schedule.name,
        model=scenario.model.name,
        machine=scenario.machine.name,
        seconds=generated / float(found.gen_tok_s),
        generated=generated,
        processed=int((workload.prompt_len + workload.output_len - 1).sum()),
        iterations=math.ceil(rounds * output),
        busy={lane: float(seconds) * layers_decoded for lane, seconds in lanes},
        facts=facts(scenario, prepared),
        predictor="MoE-Lightning",
    )


def _policy(scenario: Scenario, batch: int, parts: int) -> Policy:
    pipeline = scenario.layer
    memory = scenario.memory
    keeper = next(stage for stage in pipeline.stages if stage.op.keeps_kv)
    experts = next((stage for stage in pipeline.stages if stage.op.routed), None)
    strange = [stage for stage in pipeline.stages if not _is_modelled(stage)]
    if strange:
        raise ScenarioError(
            "moe_lightning.predict models attention, routed experts and shared ones on the gpu, "
            f"not {strange[0]}; use bound or simulate."
        )
    chosen = [item.name for item in pipeline.fetches if item.chosen]
    if chosen or scenario.routing != UNIFORM:
        what = f"fetch({chosen[0]})" if chosen else f"routing {scenario.routing}"
        raise ScenarioError(
            f"moe_lightning.predict streams whole layers for uniform routing and has no term for {what}; use bound or "
            "simulate."
        )
    if experts is None:
        raise ScenarioError(
            f"moe_lightning.predict needs a stage that computes the experts, and {pipeline} has none; add moe."
        )
    on_gpu = keeper.device is Place.GPU
    experts_on_gpu = experts.device is Place.GPU
    return Policy(
        batch=max(batch, 1),
        micro_batch=math.ceil(max(batch, 1) / parts),
        gpu_attention=int(on_gpu),
        gpu_experts=int(experts_on_gpu),
        weights_on_gpu=memory.weights_on_gpu if pipeline.streams(experts) else float(experts_on_gpu),
        kv_on_gpu=memory.kv_on_gpu if kv in pipeline.fetches else float(on_gpu),
    )


def _is_modelled(stage: Stage) -> bool:
    """True if the model has a term for a stage; shared experts and dense layers count as GPU weights of every token."""
    if stage.op.plain is shared_experts:
        return stage.device is Place.GPU
    known = (qkv, *attention, out_proj, route, combine)
    return (stage.op.plain in known or stage.op is routed) and not stage.options
