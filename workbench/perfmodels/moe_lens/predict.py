"""MoE-Lens' Stage 2 as a reader: its prediction for a scenario that `bound`, `simulate` and `run` also read."""

from __future__ import annotations

import math

from workbench.core.errors import ScenarioError
from workbench.core.result import Result, Source
from workbench.perfmodels.domain import all_at_once
from workbench.perfmodels.moe_lens.stage2 import stage2_at_rate
from workbench.pipeline import Pipeline
from workbench.scenario import Scenario
from workbench.scheduler.resource_aware import ResourceAware, steady_pace
from workbench.schedules.base import Schedule
from workbench.serving import prepare
from workbench.serving.prepared import Prepared, facts
from workbench.serving.task_cost import ENDLESS
from workbench.stages import Place, kv


def predict(scenario: Scenario, schedule: Schedule) -> Result:
    """MoE-Lens' Stage 2 prediction of a scenario: a fourth reader beside `bound`, `simulate` and `run`.

        T = min(K g / ((K / q + g) delta), K g / (It delta)),    q = N / mean of sum over i < g of ceil((p + i) / b)

    The schedule is checked against the pipeline and named in the result. Stage 2 has no schedule: it takes every
    transfer and the CPU's attention to be hidden behind the weights, as under VSLPipe.

    Parameters
    ----------
    scenario : Scenario
    schedule : Schedule

    Returns
    -------
    Result
        A result with source PREDICTED; `limits` has the times that KV memory alone and the GPU alone would take [s].

    Raises
    ------
    ScenarioError
        If the model does not apply: no weights are streamed, or KV is streamed; an operation other than decode
        attention is on the CPU; requests arrive one after the other; or the scheduler is not ResourceAware or has
        `max_running`.
    WorkbenchError
        If scenario and schedule do not go together.

    Notes
    -----
    MoE-Lens, Eqs. 8 to 14, with the sum to g - 1 and Eq. 12 mended. p and g are means. n_it = T_GPU delta, where T_GPU
    is the rate of the GPU in iterations of the scheduler's token budget, without attention. It is no bound: greedy
    admission beats it by up to 13 %.
    """
    prepared = prepare(scenario, schedule)
    if not isinstance(scenario.scheduler, ResourceAware):
        raise ScenarioError(
            f"moe_lens.predict models ResourceAware(), not {scenario.scheduler!r}; use bound or simulate."
        )
    if scenario.scheduler.max_running is not None:
        raise ScenarioError(
            f"moe_lens.predict has no term for {scenario.scheduler!r}: it knows no limit on the sequences that run; "
            "leave max_running out, or use bound or simulate."
        )
    delta = prepared.cost.fetch(prepared.cost.weights_per_layer) * prepared.layers
    if not delta:
        raise ScenarioError(
            f"moe_lens.predict models pipelines that fetch weights, not {scenario.pipeline}; use bound."
        )
    _check_pipeline(scenario.layer)
    all_at_once("moe_lens.predict", scenario.workload)
    workload = scenario.workload.as_served
    generated = int(workload.output_len.sum())
    requests = len(workload)
    predicted = stage2_at_rate(
        float(workload.prompt_len.mean()),
        generated / requests,
        requests,
        steady_pace(workload, scenario.kv_blocks, scenario.memory.kv_block),
        pass_seconds=delta,
        pass_tokens=_pass_tokens(prepared, delta),
    )
    limits = {
        "KV memory": generated / float(predicted.memory_tok_s),
        "gpu compute": generated / float(predicted.gpu_tok_s),
    }
    seconds = max(limits.values())
    return Result(
        source=Source.PREDICTED,
        schedule=prepared.lowering.schedule.name,
        model=scenario.model.name,
        machine=scenario.machine.name,
        seconds=seconds,
        generated=generated,
        processed=int((workload.prompt_len + workload.output_len - 1).sum()),
        iterations=math.ceil(round(seconds / delta, 6)),
        limits=limits,
        facts=facts(scenario, prepared),
        predictor="MoE-Lens",
    )


def _check_pipeline(pipeline: Pipeline) -> None:
    """Refuse a pipeline with work that Stage 2 has no term for, because it would count as free."""
    beside = [stage for stage in pipeline.stages if stage.device is Place.CPU and not stage.op.keeps_kv]
    strange = [f"fetch({item.name})" for item in pipeline.fetches if item is kv or item.chosen]
    if beside or strange:
        raise ScenarioError(
            f"moe_lens.predict has no term for {beside[0] if beside else strange[0]}: it knows the transfer of "
            "weights, the GPU and KV memory; use bound or simulate."
        )


def _pass_tokens(prepared: Prepared, delta: float) -> float:
    """n_it: tokens that iterations of the scheduler's budget compute in the time of one pass of weights."""
    budget = min(prepared.token_budget, ENDLESS)
    return budget * delta / max(delta, prepared.cost.gpu_seconds(budget) * prepared.layers)
