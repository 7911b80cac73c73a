"""A user's own operation works in all three readers, on either device, and a wrong one is told in a clear sentence."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import workbench as wb
from tests.live.world import TINY, differing, lane_threads, requests, scenario
from workbench.core.errors import CheckpointError, EngineError, PipelineError, ScenarioError, WorkbenchError
from workbench.core.result import Source
from workbench.engine.loading.checkpoint import open_checkpoint
from workbench.engine.tiny_model.synthesize import write_checkpoint
from workbench.models import ModelConfig
from workbench.pipeline import Pipeline, cpu, fetch, gpu, load, offload
from workbench.schedules import Schedule, Sequential, VSLPipe
from workbench.stages import (
    Op,
    Precision,
    RowClass,
    Rows,
    Work,
    attention,
    combine,
    decode_attention,
    experts,
    kv,
    moe,
    out_proj,
    prefill_attention,
    qkv,
    route,
    weights,
)

ASKED = requests((5, 1, 19, 3, 7, 2), (8, 8, 3, 8, 1, 8), seed=5)


def some_work(rows: Rows, model: ModelConfig, precision: Precision) -> Work:
    return Work(rows.tokens * model.hidden_size, 8.0 * rows.tokens * model.hidden_size, precision.weights)


def op(name: str, reads: Any, writes: Any, run: Any, **options: Any) -> Op:
    return Op(name, tuple(reads.split()), tuple(writes.split()), **{"work": some_work, "run": run, **options})


same = op("same", "x", "x", lambda x: x)
scale = op("scale", "x", "x", lambda x: x * 1.5)
gate = op("gate", "x", "opened", lambda x: torch.sigmoid(x))
gated = op("gated", "x opened", "x", lambda x, opened: x * opened)

PLAIN = fetch(weights) | gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load >> gpu(out_proj, moe)

WIRED: dict[str, tuple[Pipeline, tuple[Schedule, ...]]] = {
    "at the end": (PLAIN >> gpu(scale), (Sequential(2), VSLPipe())),
    "at the start": (gpu(scale) >> PLAIN, (Sequential(2), VSLPipe())),
    "on the cpu": (
        fetch(weights)
        | gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention, scale) >> load >> gpu(out_proj, moe),
        (Sequential(2), VSLPipe()),
    ),
    "all on the cpu": (cpu(scale, qkv, attention, out_proj, moe), (Sequential(2),)),
    "gating": (gpu(qkv, attention, out_proj, moe, gate, gated), (Sequential(1), Sequential(2))),
    "gating across the link": (
        gpu(qkv, attention, out_proj, moe) >> offload >> cpu(gate) >> load >> gpu(gated),
        (Sequential(1), Sequential(2)),
    ),
}


def by_hand(model: ModelConfig, name: str) -> tuple[tuple[int, ...], ...]:
    """The same arithmetic with everything on the GPU, one request at a time."""
    chain = {
        "at the end": gpu(qkv, attention, out_proj, moe, scale),
        "at the start": gpu(scale, qkv, attention, out_proj, moe),
        "on the cpu": gpu(qkv, attention, scale, out_proj, moe),
        "all on the cpu": gpu(scale, qkv, attention, out_proj, moe),
    }.get(name, gpu(qkv, attention, out_proj, moe, gate, gated))
    return tuple(wb.run(scenario(model, (request,), chain), Sequential()).tokens[0] for request in ASKED)


@pytest.fixture(scope="module")
def plain(tiny: ModelConfig) -> tuple[tuple[int, ...], ...]:
    return wb.run(scenario(tiny, ASKED, PLAIN), Sequential()).tokens


@pytest.mark.parametrize("name", WIRED)
def test_in_all_three_readers(name: str, tiny: ModelConfig, plain: Any) -> None:
    pipeline, schedules = WIRED[name]
    want = by_hand(tiny, name)
    assert differing(want, plain) > 0.5
    for schedule in schedules:
        of = scenario(tiny, ASKED, pipeline, tokens=28, block=2, budget=30)
        bound, simulated, measured = (read(of, schedule) for read in (wb.bound, wb.simulate, wb.run))
        assert [r.source for r in (bound, simulated, measured)] == [Source.BOUND, Source.SIMULATED, Source.MEASURED]
        assert bound.seconds <= simulated.seconds
        assert measured.tokens == want


@pytest.mark.parametrize("where", [gpu, cpu], ids=lambda where: where.__name__)
def test_identity_changes_nothing(where: Callable[..., Pipeline], tiny: ModelConfig, plain: Any) -> None:
    pipeline = where(same, qkv, attention, same, out_proj, moe, same)
    assert wb.run(scenario(tiny, ASKED, pipeline), Sequential(2)).tokens == plain


def test_experts_on_the_cpu(tiny: ModelConfig, plain: Any) -> None:
    pipeline = fetch(weights) | gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine)
    assert wb.run(scenario(tiny, ASKED, pipeline, tokens=28, block=2), Sequential(2)).tokens == plain


def test_fork_with_an_own_op(tiny: ModelConfig) -> None:
    """Routed experts on the CPU beside an own branch on the GPU."""
    branch = op("branch", "h", "side", lambda h: torch.tanh(h))
    join = op("join", "x routed side", "x", lambda x, routed, side: x + routed + side)
    forked = gpu(qkv, attention, out_proj, route) >> (gpu(branch) | offload >> cpu(experts) >> load) >> gpu(join)
    straight = gpu(qkv, attention, out_proj, route, branch, experts, join)
    want = wb.run(scenario(tiny, ASKED, straight), Sequential()).tokens
    assert wb.run(scenario(tiny, ASKED, forked, tokens=28, block=2), Sequential(2)).tokens == want


def test_rows_of_one_class(tiny: ModelConfig, plain: Any) -> None:
    """An own op for prefill rows and another for decode rows write the two halves of one buffer."""
    before = op("before", "attn", "attn", lambda attn: attn * 2, rows=RowClass.PREFILL)
    during = op("during", "attn", "attn", lambda attn: attn * 2, rows=RowClass.DECODE)
    both = op("both", "attn", "attn", lambda attn: attn * 2)
    want = wb.run(scenario(tiny, ASKED, gpu(qkv, attention, both, out_proj, moe)), Sequential()).tokens
    assert differing(want, plain) > 0.5
    halves = gpu(qkv, attention, before, during, out_proj, moe)
    assert wb.run(scenario(tiny, ASKED, halves, tokens=28, block=2), Sequential(2)).tokens == want


def test_qk_norm_before_the_cache(tiny: ModelConfig, plain: Any) -> None:
    """An own op that rewrites q and k: what is cached is what it wrote, on either side of the link."""

    def norm(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q / q.norm(dim=-1, keepdim=True) * 4, k / k.norm(dim=-1, keepdim=True) * 4

    qk = op("qk_norm", "q k", "q k", norm)
    want = wb.run(scenario(tiny, ASKED, gpu(qkv, qk, attention, out_proj, moe)), Sequential()).tokens
    assert differing(want, plain) > 0.5
    split = fetch(weights) | gpu(qkv, qk, prefill_attention) >> offload >> cpu(decode_attention) >> load >> gpu(
        out_proj, moe
    )
    assert wb.run(scenario(tiny, ASKED, split, tokens=28, block=2), VSLPipe()).tokens == want


# --------------------------------------------------------------------- what a functional op may do without being warned


def test_a_saved_buffer_is_not_overwritten_by_a_move(tiny: ModelConfig) -> None:
    """`save` returns its input. A later transfer of x must not write into what it saved."""
    save = op("save", "x", "saved", lambda x: x)
    add = op("add", "x saved", "x", lambda x, saved: x + 0.5 * saved)
    straight = gpu(save, qkv, attention, out_proj, moe, add)
    want = wb.run(scenario(tiny, ASKED, straight), Sequential()).tokens
    crossed = cpu(save) >> load >> gpu(qkv, attention, out_proj, moe) >> offload >> cpu(add)
    assert wb.run(scenario(tiny, ASKED, crossed), Sequential()).tokens == want


def test_a_saved_buffer_is_not_overwritten_by_one_class(tiny: ModelConfig) -> None:
    """`keep` returns its input. An op for one class of rows must not write into what it kept."""
    keep = op("keep", "attn", "kept", lambda attn: attn)
    before = op("before", "attn", "attn", lambda attn: attn * 3, rows=RowClass.PREFILL)
    mix = op("mix", "attn kept", "attn", lambda attn, kept: attn - kept)
    copied = replace(keep, run=lambda attn: attn.clone())
    want = wb.run(scenario(tiny, ASKED, gpu(qkv, attention, copied, before, mix, out_proj, moe)), Sequential()).tokens
    assert (
        wb.run(scenario(tiny, ASKED, gpu(qkv, attention, keep, before, mix, out_proj, moe)), Sequential()).tokens
        == want
    )


def test_a_transposed_buffer_crosses_the_link(tiny: ModelConfig) -> None:
    """A result that does not lie in row order in memory is moved like any other, and moved over."""
    turned = op("turned", "x", "y", lambda x: (x * 2).t().contiguous().t())
    again = op("again", "y", "y", lambda y: y + 1)
    add = op("add", "x y", "x", lambda x, y: x + y)
    straight = gpu(turned, again, qkv, attention, out_proj, moe, add)
    want = wb.run(scenario(tiny, ASKED, straight), Sequential()).tokens
    crossed = cpu(turned) >> load >> gpu(again, qkv, attention, out_proj, moe) >> offload >> cpu(add)
    assert wb.run(scenario(tiny, ASKED, crossed), Sequential()).tokens == want


def test_an_op_without_work_runs(tiny: ModelConfig, plain: Any) -> None:
    """`bound` and `simulate` need the work; `run` with a token budget of its own does not."""
    bare = replace(same, work=None)
    for pipeline in (gpu(qkv, attention, out_proj, moe, bare), PLAIN >> gpu(bare)):
        of = scenario(tiny, ASKED, pipeline)
        for read in (wb.bound, wb.simulate):
            with pytest.raises(ScenarioError, match=r"'same'.*work"):
                read(of, Sequential())
        assert wb.run(of, Sequential()).tokens == plain


# -------------------------------------------------------------------------------------------------- pieces of prompts


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **before: torch.Tensor) -> torch.Tensor:
    """Causal attention of one prompt's piece, as a user would write it."""
    past = len(before["k_before"]) if before else 0
    keys, values = (torch.cat((before[f"{n}_before"], new)) if past else new for n, new in (("k", k), ("v", v)))
    group, dim = TINY.num_attention_heads // TINY.num_key_value_heads, TINY.head_dim
    queries = q.view(len(q), -1, dim).transpose(0, 1)
    keys, values = (
        rows.view(len(rows), -1, dim).transpose(0, 1).repeat_interleave(group, dim=0) for rows in (keys, values)
    )
    scores = queries @ keys.transpose(1, 2) / dim**0.5
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(past)
    return (scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ values).transpose(0, 1).reshape(len(q), -1)


attending = op("attending", "q k v", "attn", attend, rows=RowClass.PREFILL, reads_past=True)


def in_pieces(model: ModelConfig, pipeline: Pipeline) -> wb.Scenario:
    """One request, so that rows of a batch are of one prompt."""
    return scenario(model, requests((19,), (8,), seed=6), pipeline).on(scheduler=wb.ChunkedPrefill(5))


@pytest.mark.parametrize(
    "wired",
    [
        lambda own: gpu(qkv, own, decode_attention, out_proj, moe),
        lambda own: fetch(kv) | gpu(qkv, own, decode_attention, out_proj, moe),
    ],
    ids=["resident", "fetched"],
)
def test_own_attention_takes_the_earlier_pieces_of_a_prompt(wired: Callable[..., Pipeline], tiny: ModelConfig) -> None:
    want = wb.run(in_pieces(tiny, gpu(qkv, attention, out_proj, moe)), Sequential()).tokens
    assert wb.run(in_pieces(tiny, wired(attending)), Sequential()).tokens == want
    forgetful = replace(attending, run=lambda q, k, v, **before: attend(q, k, v))
    assert wb.run(in_pieces(tiny, wired(forgetful)), Sequential()).tokens != want


def test_own_attention_to_its_own_piece_alone_is_refused_where_prompts_come_in_pieces(tiny: ModelConfig) -> None:
    alone = gpu(qkv, replace(attending, reads_past=False), decode_attention, out_proj, moe)
    for read in (wb.run, wb.simulate, wb.bound):
        with pytest.raises(ScenarioError, match=r"gpu\(attending\) attends to its own piece alone; give.*reads_past"):
            read(in_pieces(tiny, alone), Sequential())
    whole = in_pieces(tiny, alone).on(scheduler=wb.ContinuousBatching(40))
    want = wb.run(in_pieces(tiny, gpu(qkv, attention, out_proj, moe)), Sequential()).tokens
    assert wb.run(whole, Sequential()).tokens == want


def test_an_own_op_on_prompts_that_is_no_attention_needs_no_cache_beside_it(tiny: ModelConfig) -> None:
    """It stands on the other device than the KV, and prompts may come in pieces all the same."""
    doubled = op("doubled", "attn", "attn", lambda attn: attn * 2, rows=RowClass.PREFILL)
    straight = gpu(qkv, attention, doubled, out_proj, moe)
    across = gpu(qkv, attention) >> offload >> cpu(doubled) >> load >> gpu(out_proj, moe)
    want = wb.run(in_pieces(tiny, straight), Sequential()).tokens
    assert wb.run(in_pieces(tiny, across), Sequential()).tokens == want


# -------------------------------------------------------------------------------------------------------------- weights


def mix(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return x + torch.tanh(x @ weights["mix.weight"].T) * weights["mix.gain"]


mixed = Op(
    "mixed",
    ("x",),
    ("x",),
    work=some_work,
    run=mix,
    working=lambda model, size: 1000.0 * size * model.hidden_size,
    tensors=lambda model: {"mix.weight": (model.hidden_size, model.hidden_size), "mix.gain": (model.hidden_size,)},
)
SQUARE = TINY.hidden_size * TINY.hidden_size + TINY.hidden_size


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """A checkpoint with tensors of `mixed` in every layer."""
    folder, random = write_checkpoint(TINY, tmp_path_factory.mktemp("weighted")), torch.Generator().manual_seed(3)
    tensors = {
        f"model.layers.{layer}.{name}": torch.randn(shape, generator=random)
        for layer in range(TINY.num_hidden_layers)
        for name, shape in mixed.shapes(TINY).items()
    }
    save_file(tensors, folder / "mixed.safetensors")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        known = json.loads(index.read_text())
        known["weight_map"] |= dict.fromkeys(tensors, "mixed.safetensors")
        index.write_text(json.dumps(known))
    return wb.checkpoint(folder)


@pytest.mark.parametrize(
    "pipeline",
    [
        PLAIN >> gpu(mixed),
        fetch(mixed.weights) | gpu(qkv, attention, out_proj, moe, mixed),
        gpu(qkv, attention, out_proj, moe, mixed),
        gpu(qkv, attention, out_proj, moe) >> offload >> cpu(mixed) >> load,
    ],
    ids=["all streamed", "alone streamed", "resident", "on the cpu"],
)
def test_weights_are_given_wherever_they_lie(pipeline: Pipeline, weighted: ModelConfig) -> None:
    """The same tokens by hand, weights kept inside the function and read per layer."""
    held = open_checkpoint(weighted, [(layer, mixed) for layer in range(weighted.num_hidden_layers)])
    layers = iter([n for _ in range(10**6) for n in range(TINY.num_hidden_layers)])

    def inside(x: torch.Tensor) -> torch.Tensor:
        layer = next(layers)
        return mix(x, {name: held[f"model.layers.{layer}.{name}"] for name in mixed.shapes(TINY)})

    bare = op("bare", "x", "x", inside)
    want = wb.run(scenario(weighted, ASKED, gpu(qkv, attention, out_proj, moe, bare)), Sequential()).tokens
    assert differing(want, wb.run(scenario(weighted, ASKED), Sequential()).tokens) > 0.5
    for schedule in (Sequential(2), Sequential(2, prefetch=True)):
        of = scenario(weighted, ASKED, pipeline, tokens=28, block=2, budget=30)
        bound, simulated, measured = (read(of, schedule) for read in (wb.bound, wb.simulate, wb.run))
        assert bound.seconds <= simulated.seconds
        assert measured.tokens == want


def test_weights_and_working_memory_are_in_the_ledger(weighted: ModelConfig) -> None:
    without = wb.fits(scenario(weighted, ASKED, gpu(qkv, attention, out_proj, moe)), Sequential()).gpu
    resident = wb.fits(scenario(weighted, ASKED, gpu(qkv, attention, out_proj, moe, mixed)), Sequential()).gpu
    assert resident["weights"] - without["weights"] == 4 * SQUARE * TINY.num_hidden_layers
    alone = fetch(mixed.weights) | gpu(qkv, attention, out_proj, moe, mixed)
    streamed = wb.fits(scenario(weighted, ASKED, alone), Sequential())
    assert streamed.gpu["weights"] == without["weights"]
    assert streamed.gpu["weight slots"] == 2 * 4 * SQUARE
    assert streamed.host["weights"] == 4 * SQUARE * TINY.num_hidden_layers
    tokens = 37  # of all prompts
    assert resident["largest operation"] == (1000 + 1) * 4 * TINY.hidden_size * tokens
    assert without["largest operation"] < resident["largest operation"]


MODULE = """
from workbench.stages import Op, Work

def work(rows, model, precision):
    return Work(rows.tokens * model.hidden_size, 8.0 * rows.tokens * model.hidden_size, precision.weights)

def run(x, weights):
    return x * weights["mix.gain"]

gained = Op("gained", ("x",), ("x",), work=work, run=run, tensors=lambda model: {"mix.gain": (model.hidden_size,)})
"""
ELSEWHERE = """
import sys
import gained_by_a_user
import workbench as wb
from workbench.schedules import Sequential
print(wb.run(wb.Scenario.load(sys.argv[1]), Sequential()).tokens)
"""


def test_it_is_saved_loaded_and_run_elsewhere(
    weighted: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gained_by_a_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    gained = importlib.import_module("gained_by_a_user").gained
    of = scenario(weighted, ASKED, fetch(gained.weights) | gpu(qkv, attention, out_proj, moe, gained))
    path = of.save(tmp_path / "s.json")
    assert json.loads(path.read_text())["pipeline"]["chain"][-1]["op"] == "gained_by_a_user:gained"
    back = wb.Scenario.load(path)
    assert back.pipeline.stages[-1].op is gained
    assert back.diff(of) == {}
    tokens = wb.run(back, Sequential()).tokens
    assert tokens == wb.run(of, Sequential()).tokens
    paths = os.pathsep.join([str(tmp_path), str(Path(wb.__file__).parents[1])])
    told = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, path], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert told.stdout.strip() == str(tokens), told.stderr


# ------------------------------------------------------------------------------------------------------------- mistakes


def refused(pipeline: Pipeline, model: ModelConfig, names: str, kind: type[WorkbenchError] = EngineError) -> str:
    with pytest.raises(kind, match=names) as caught:
        wb.run(scenario(model, ASKED, pipeline), Sequential())
    assert not lane_threads()
    return str(caught.value)


def test_no_run_function(tiny: ModelConfig) -> None:
    message = refused(gpu(qkv, attention, out_proj, moe, replace(scale, run=None)), tiny, "scale")
    assert "run" in message


def test_never_written(tiny: ModelConfig) -> None:
    with pytest.raises(PipelineError, match="opened"):
        scenario(tiny, ASKED, gpu(qkv, attention, out_proj, moe, gated))


def test_moves_are_asked_for(tiny: ModelConfig) -> None:
    with pytest.raises(PipelineError, match="offload"):
        gpu(qkv, attention, out_proj, moe) >> cpu(gate)


WRONG: dict[str, Callable[..., Any]] = {
    "too many outputs": lambda x: (x, x),
    "an empty tuple": lambda x: (),
    "nothing": lambda x: None,
    "a numpy array": lambda x: x.numpy(),
    "a number": lambda x: 1.0,
    "one row too few": lambda x: x[:-1],
    "one row for all": lambda x: x.mean(dim=0, keepdim=True),
    "one column for all": lambda x: x.mean(dim=1, keepdim=True),
    "a wider row": lambda x: torch.cat((x, x), dim=1),
    "no rows": lambda x: x.flatten(),
    "another precision": lambda x: x.double(),
    "other arguments": lambda y: y,
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_answer_is_told(mistake: str, tiny: ModelConfig) -> None:
    """One sentence that names the op, what it wrote and what was expected; never a silent broadcast."""
    wrong = op("clumsy", "x", "x", WRONG[mistake])
    kind: Any = (EngineError, TypeError) if mistake == "other arguments" else EngineError
    with pytest.raises(kind, match="clumsy" if kind is EngineError else "unexpected keyword") as caught:
        wb.run(scenario(tiny, ASKED, gpu(qkv, attention, out_proj, moe, wrong)), Sequential(2))
    assert "this is a bug" not in str(caught.value)


@pytest.mark.parametrize("rows", [RowClass.PREFILL, RowClass.DECODE], ids=lambda rows: rows.value)
def test_a_wrong_answer_for_one_class_is_told(rows: RowClass, tiny: ModelConfig) -> None:
    wrong = op("clumsy", "attn", "attn", lambda attn: attn[:1] * 2, rows=rows)
    with pytest.raises(EngineError, match="clumsy"):
        wb.run(scenario(tiny, ASKED, gpu(qkv, attention, wrong, out_proj, moe)), Sequential())


def test_a_wide_own_buffer_that_crosses_is_told(tiny: ModelConfig) -> None:
    """A buffer of one's own is as wide as the model: another width is the user's mistake, not a bug of the engine."""
    wide = op("wide", "x", "y", lambda x: torch.cat((x, x), dim=1))
    use = op("use", "x y", "x", lambda x, y: x + y[:, : x.shape[1]])
    pipeline = gpu(qkv, attention, out_proj, moe) >> offload >> cpu(wide) >> load >> gpu(use)
    with pytest.raises(EngineError, match="wide") as caught:
        wb.run(scenario(tiny, ASKED, pipeline), Sequential())
    assert "this is a bug" not in str(caught.value)


def test_an_error_inside_an_own_op_surfaces(tiny: ModelConfig) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        wb.run(scenario(tiny, ASKED, PLAIN >> gpu(op("broken", "x", "x", broken))), VSLPipe())


def test_an_own_op_with_params_alone_is_told(tiny: ModelConfig) -> None:
    """`params` makes `fetch(weights)` stream weights of which no tensor is known: refuse before any work."""
    heavy = replace(scale, params=lambda model: 10)
    assert "has params and names no tensors" in refused(PLAIN >> gpu(heavy), tiny, "scale")


def test_a_tensor_that_another_stage_reads_is_told(weighted: ModelConfig) -> None:
    refused(PLAIN >> gpu(mixed, mixed), weighted, r"gpu\(mixed\) reads the tensor 'mix.gain', as another stage does")
    greedy = replace(mixed, tensors=lambda model: {"self_attn.o_proj.weight": (model.hidden_size, model.q_size)})
    refused(PLAIN >> gpu(greedy), weighted, "self_attn.o_proj.weight")


def test_a_checkpoint_without_the_tensors_or_with_others_is_told(tiny: ModelConfig, weighted: ModelConfig) -> None:
    refused(PLAIN >> gpu(mixed), tiny, "no tensor model.layers.0.mix.weight", CheckpointError)
    larger = replace(mixed, tensors=lambda model: {"mix.weight": (model.hidden_size, 3)})
    refused(PLAIN >> gpu(larger), weighted, r"an operation asks for \(32, 3\)", CheckpointError)


@pytest.mark.parametrize("shape", [(), (0, 2), (2.0,), 4, (-1,), None], ids=str)
def test_a_shape_of_no_tensor_is_told(shape: Any, weighted: ModelConfig) -> None:
    odd = replace(mixed, tensors=lambda model: {"mix.weight": shape})
    refused(PLAIN >> gpu(odd), weighted, "'mix.weight' of Op.'mixed'", PipelineError)


def test_params_beside_tensors_are_told() -> None:
    with pytest.raises(PipelineError, match=r"Op\('mixed'\) has params and tensors"):
        replace(mixed, params=lambda model: 10)


def test_an_own_op_that_keeps_the_cache_is_not_ignored(tiny: ModelConfig) -> None:
    """An own decode attention with a run function: it is called, or refused, but not replaced in silence."""
    own = replace(decode_attention, run=lambda q, k, v: torch.zeros_like(q))
    refused(gpu(qkv, prefill_attention, own, out_proj, moe), tiny, "decode_attention")
