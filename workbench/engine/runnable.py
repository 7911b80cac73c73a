"""Checks, before any long work, of the conditions of `run` that go beyond those of `simulate`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.core.errors import EngineError
from workbench.core.units import CPU_ONLY, PACKED, format_bytes
from workbench.engine.loading.checkpoint import TORCH_DTYPES
from workbench.engine.loading.tensors import sources
from workbench.engine.model.operations import OPERATIONS
from workbench.hardware import free_memory
from workbench.kernels import PackedExperts
from workbench.models import ModelConfig
from workbench.models.families import RUNNABLE
from workbench.pipeline import LayerRange
from workbench.pipeline.layer_graph import LayerGraph
from workbench.pipeline.stack_graph import StackGraph
from workbench.scenario import Scenario
from workbench.serving.capacity import ledger
from workbench.serving.prepared import Prepared
from workbench.stages import (
    Place,
    Precision,
    Stage,
    add_shared,
    decode_attention,
    experts,
    out_proj,
    prefill_attention,
    qkv,
)
from workbench.stages.unsuited import lacks_shared
from workbench.workload import Request
from workbench.workload.tokenizer import load_tokenizer

SMALLEST_HEAD = 16
LARGEST_HEAD = 256
"""Dims of heads for which the kernels of a card compute attention."""
LARGEST_LATENT = 576
"""Most dims of latents with their rotated keys for which they do."""


def check_runnable(prepared: Prepared, *, on_card: bool = False) -> None:
    """Refuse a scenario that cannot be executed, on the host or with the gpu lane on a card.

    Raises
    ------
    EngineError
        If model, machine, precision, requests or a stage cannot be run, or less memory is free than it takes.
    CheckpointError
        If a request ends with a text, and the model's tokenizer cannot be loaded.
    """
    scenario = prepared.scenario
    model = scenario.model
    requests = scenario.workload.requests
    if model.path is None:
        raise EngineError(f"model {model.name!r} has no weights here; give model=wb.checkpoint(folder).")
    if not scenario.machine.is_local:
        raise EngineError(f"machine {scenario.machine.name!r} is not this computer; give machine=wb.Machine.local().")
    if strange := _strange(model):
        raise EngineError(
            f"model {model.name!r} has {strange}, which run cannot execute; give a checkpoint of "
            f"{' or '.join(RUNNABLE)} without."
        )
    stack = prepared.lowering.stack
    _check_shared(scenario.stack, model)
    _check_dense(stack, model)
    if model.kv_lora_rank:
        for graph in stack.graphs:
            _check_latent(graph, model)
    _check_precision(scenario.precision)
    _check_packed(scenario)
    if not requests:
        raise EngineError(
            f"workload {scenario.workload.name!r} has lengths but no tokens; give Workload.from_jsonl(path)."
        )
    for number, request in enumerate(requests):
        check_request(number, request, model)
    for each in scenario.stack:
        stages = each.pipeline.stages
        for number, stage in enumerate(stages):
            others = stages[:number] + stages[number + 1 :]
            if refusal := lacks_shared(stage, model):
                raise EngineError(refusal)
            if problem := _problem(stage, model) or _shared_tensor(stage, others, model):
                raise EngineError(f"{stage} {problem}.")
    if on_card:
        _check_card(prepared)
    _check_free(prepared, on_card)


def card_takes(prepared: Prepared) -> bool:
    """True if the engine computes a pipeline's gpu lane on a card."""
    try:
        _check_card(prepared)
    except EngineError:
        return False
    return True


def card_attends(model: ModelConfig) -> bool:
    """True if attention on a card takes a model's heads."""
    try:
        _check_attention_on_card(model)
    except EngineError:
        return False
    return True


def _check_card(prepared: Prepared) -> None:
    """Refuse what the engine does not compute on a card."""
    _check_attention_on_card(prepared.scenario.model)
    form = prepared.scenario.precision.experts
    if form in PACKED:
        for layer, _ in prepared.lowering.stack.alike:
            _check_experts_on_card(prepared.lowering.stack, layer, form)


def _check_attention_on_card(model: ModelConfig) -> None:
    """Refuse heads and latents that attention on a card does not take."""
    for dims in (model.head_dim, model.v_head_dim or model.head_dim):
        if not SMALLEST_HEAD <= dims <= LARGEST_HEAD:
            raise EngineError(
                f"model {model.name!r} has heads of {dims} dims, and attention on a card takes {SMALLEST_HEAD} to "
                f"{LARGEST_HEAD}; give device='cpu'."
            )
    if model.kv_lora_rank and model.latent_size > LARGEST_LATENT:
        raise EngineError(
            f"model {model.name!r} has latents of {model.latent_size} dims, and attention on a card takes "
            f"{LARGEST_LATENT} at most; give device='cpu'."
        )


def _check_experts_on_card(stack: StackGraph, layer: int, form: str) -> None:
    """Refuse what a layer's experts in 4 or 8 bits cannot be on a card."""
    stages = [stage for stage in stack.stages(layer) if stage.op.plain is experts]
    there = [stage for stage in stages if stage.device is Place.GPU]
    pipeline = stack.pipeline(layer)
    if there and form in CPU_ONLY:
        raise EngineError(
            f"experts in {form} are held for the CPU's kernels, and {pipeline} computes some on the GPU; place experts "
            "on the CPU, give device='cpu', or Memory(weights='int4')."
        )
    streamed = {piece.op for stage in there for piece in stack.pieces(stage, layer) if piece.streamed}
    on_cpu = {piece.op for stage in stages if stage.device is Place.CPU for piece in stack.pieces(stage, layer)}
    if streamed & on_cpu:
        raise EngineError(
            f"experts in {form} are laid out for the device that computes them, and {pipeline} streams some to the GPU "
            "that the CPU computes too; place them on one device, keep those of the GPU there, or give device='cpu'."
        )


def _check_free(prepared: Prepared, on_card: bool) -> None:
    """Refuse what does not fit the host's memory that is free now; without a card, both lanes are there.

    Weights that stay on a card are read into the host's memory first.
    """
    found = ledger(prepared)
    needed = found.host.total + (found.gpu["weights"] if on_card else found.gpu.total)
    free = free_memory()
    if needed > free.bytes:
        entries = sorted(
            (*found.host.entries, *(found.gpu.entries if not on_card else ())), key=lambda entry: -entry.bytes
        )
        most = " and ".join(f"{entry.name} {format_bytes(entry.bytes)}" for entry in entries[:2])
        raise EngineError(
            f"a run on {prepared.scenario.model.name!r} takes {format_bytes(needed)} of memory ({most} are most of "
            f"it), and {free.of} has {format_bytes(free.bytes)} of {format_bytes(free.whole)} free. End other "
            "programs, or give Memory a smaller kv_capacity or weights='int8' or 'int4'."
        )


def check_request(number: int, request: Request, model: ModelConfig) -> None:
    """Refuse a request that the model cannot serve.

    Raises
    ------
    EngineError
        If the model does not know one of its tokens.
    CheckpointError
        If it ends with a text, and the model's tokenizer cannot be loaded.
    """
    for token in (*request.prompt, *request.sampling.stop_token_ids):
        if not isinstance(token, int | np.integer) or not 0 <= token < model.vocab_size:
            raise EngineError(
                f"request {number} has the token id {token!r}, {model.name!r} knows 0 to {model.vocab_size - 1}; "
                "use the model's own tokenizer."
            )
    if request.sampling.stop:
        load_tokenizer(model)


def _check_precision(precision: Precision) -> None:
    """Refuse number formats that the engine does not hold."""
    kept = {"weights": precision.weights, "kv": precision.kv, "others": precision.others}
    if precision.experts not in PACKED:
        kept["experts"] = precision.experts
    for what, dtype in kept.items():
        if dtype is not None and dtype not in TORCH_DTYPES:
            known = " or ".join(TORCH_DTYPES)
            raise EngineError(f"run keeps {what} in {known}, not in {dtype}; give Memory one of these.")


def _check_packed(scenario: Scenario) -> None:
    """Refuse quantised experts of other sizes than whole blocks, and pipelines whose experts the user computes."""
    model = scenario.model
    form = scenario.precision.experts
    if form not in PACKED:
        return
    if model.hidden_size % PackedExperts.UNIT or model.expert_width % PackedExperts.UNIT:
        raise EngineError(
            f"experts in {form} have sizes that are multiples of {PackedExperts.UNIT}, and those of {model.name!r} are "
            f"{model.hidden_size} x {model.expert_width}; give Memory(weights='fp32' or 'bf16')."
        )
    ops = [stage.op for stage in scenario.stages]
    others = [op.name for op in ops if op.routed and op.plain is not experts]
    built_in = any(op.plain is experts for op in ops)
    if others or not built_in:
        raise EngineError(
            f"only the built-in experts compute in {form}, and {scenario.pipeline} "
            f"{f'has {others[0]!r} too' if built_in else 'has none'}; give Memory(weights='fp32' or 'bf16')."
        )


def _strange(model: ModelConfig) -> str:
    """The components of a model's layers that `run` cannot execute; empty if there are none."""
    found = {
        "latent attention": model.kv_lora_rank and "kv_lora_rank" not in model.family.options,
        "shared experts": model.shared_params and model.family.tensors.shared is None,
        "attention biases": model.attention_bias and "attention_bias" not in model.family.options,
    }
    return ", ".join(what for what, there in found.items() if there)


def _check_shared(stack: Sequence[LayerRange], model: ModelConfig) -> None:
    """Refuse a pipeline that does not add the output of shared experts: `run` omits nothing silently."""
    for each in stack if model.shared_params else ():
        if not any("shared" in stage.op.reads or stage.op is add_shared for stage in each.pipeline.stages):
            raise EngineError(
                f"model {model.name!r} has shared experts, whose output {each.pipeline} adds nowhere; use the built-in "
                "experts and combine, or an operation that reads shared."
            )


def _check_latent(graph: LayerGraph, model: ModelConfig) -> None:
    """Refuse pipelines in which prompt attention cannot read the projections around it."""
    pipeline = graph.pipeline
    around = [stage for stage in pipeline.stages if stage.op in (qkv, prefill_attention, out_proj)]
    holding = [node for node in graph.nodes if set(around) & set(node.stages)]
    streamed = [stage for stage in around if pipeline.streams(stage)]
    if len({stage.device for stage in around}) > 1 or (streamed and len(holding) > 1):
        raise EngineError(
            f"prompt attention of {model.name!r} expands latents with the weights of qkv and out_proj; place all three "
            "on one device, and without a stage of the other between them where their weights are streamed."
        )
    for stage in pipeline.stages:
        if stage.op.run is not None and {"q", "attn"}.intersection((*stage.op.reads, *stage.op.writes)):
            raise EngineError(
                f"{stage} reads or writes q or attn, whose rows differ between prompts and decodes in {model.name!r}; "
                "use the built-in operation."
            )


def _check_dense(stack: StackGraph, model: ModelConfig) -> None:
    """Refuse what layers without experts cannot do: to feed a user's operation, or to add what was deferred."""
    for each in stack.ranges:
        layers = range(each.first, each.stop or 0)
        for stage in each.pipeline.stages:
            missing = [(layer, buffer) for layer in layers for buffer in sorted(stack.missing(stage, layer))]
            if missing and stage.op.run is not None:
                layer, buffer = missing[0]
                raise EngineError(
                    f"{stage} reads {buffer}, which layer {layer} of {model.name!r} does not have; use a model whose "
                    "layers are alike, or the built-in operation."
                )
            dense = [model.layer_kinds[layer].dense for layer in layers]
            if stage.defer and dense != sorted(dense, reverse=True):
                raise EngineError(
                    f"{stage} defers experts to the next layer, and layers of {model.name!r} without experts follow "
                    "some with; leave defer out."
                )


def _problem(stage: Stage, model: ModelConfig) -> str:
    """Reason that `run` cannot execute a stage; empty if it can."""
    op = stage.op
    if op.run is None:
        built_in = op.plain in OPERATIONS or op == decode_attention
        return "" if built_in else "has no run function; give Op(..., run=...)"
    if op.keeps_kv:
        return "keeps the KV cache, which run leaves to the built-in decode_attention; use that one"
    return "has params and names no tensors; give Op(..., tensors=...) in their place" if op.params else ""


def _shared_tensor(stage: Stage, others: Sequence[Stage], model: ModelConfig) -> str:
    """A tensor of a user's operation that another stage reads too, so that the ledger counts it twice; else empty."""
    if not stage.op.tensors:
        return ""
    layers = range(model.num_hidden_layers)
    own = zip(stage.op.shapes(model), sources(stage.op, model, 0), strict=True)
    theirs = {source.name for other in others for layer in layers for source in sources(other.op, model, layer)}
    shared = sorted(name for name, source in own if source.name in theirs)
    return f"reads the tensor {shared[0]!r}, as another stage does; give each stage its own" if shared else ""
