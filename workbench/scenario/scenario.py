"""Scenarios: one immutable description of the pipeline, the requests and the hardware, which every reader takes."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from workbench.core.display import html_table
from workbench.core.errors import CapacityError, ScenarioError
from workbench.core.records import read_json, reason
from workbench.core.units import GROUPS, QUANTISED, STORED_INT4, format_bytes, format_bytes_up, parse_bytes
from workbench.hardware import Machine
from workbench.models import ModelConfig
from workbench.pipeline import LayerRange, Pipeline, Stack, resolve, with_shared_experts
from workbench.pipeline.shares import with_shares
from workbench.pipeline.stack_graph import StackGraph, stack_graph
from workbench.scenario.memory import Memory
from workbench.scenario.question import digest_of
from workbench.scenario.record import FORMAT, NotImportedError, differences, fields_from, plain_fields
from workbench.scheduler.base import Scheduler
from workbench.stages import Op, Precision, RowClass, Stage, experts, kv
from workbench.stages.unsuited import leaves_none
from workbench.workload import UNIFORM, Routing, Workload
from workbench.workload.lengths import Lengths

_GRAPHS = 24
"""Graphs of layers that are kept for other scenarios with the same layers."""


@dataclass(frozen=True)
class Scenario:
    """A pipeline, or a stack of them, with the model, machine, memory, workload and scheduler that it is read for.

    `routing` tells how often `bound` and `simulate` expect each expert to be chosen; `run` counts what happens.

    Raises
    ------
    PipelineError
        If a transfer is forgotten or useless, or the pipeline is no whole layer.
    ScenarioError
        If a sequence would be longer than the model's positions, sets of experts leave one out or have one twice, or a
        share of weights or KV is to stay on the GPU of which nothing is streamed.
    CapacityError
        If the longest sequence does not fit the KV cache.
    """

    pipeline: Pipeline | Stack
    model: ModelConfig
    machine: Machine
    memory: Memory
    workload: Workload
    scheduler: Scheduler
    routing: Routing = UNIFORM

    def __post_init__(self) -> None:
        expected = {
            "pipeline": Pipeline | Stack,
            "model": ModelConfig,
            "machine": Machine,
            "memory": Memory,
            "workload": Workload,
            "routing": Routing,
        }
        for field, kind in expected.items():
            if not isinstance(getattr(self, field), kind):
                name = kind.__name__ if isinstance(kind, type) else "Pipeline or a Stack"
                raise ScenarioError(f"Scenario({field}=...) must be a {name}, not {getattr(self, field)!r}.")
        if isinstance(self.scheduler, type) or not callable(getattr(self.scheduler, "open", None)):
            raise ScenarioError(
                f"Scenario(scheduler=...) must be a scheduler such as ResourceAware(), not {self.scheduler!r}."
            )
        for each in self.stack:
            resolve(each.pipeline)
        self._check_choices()
        self._check_lengths()
        self._check_groups()
        self._check_sets()
        self._check_shares()
        self._check_states()
        self.routing.check(self.model)

    def _check_choices(self) -> None:
        for stage in self.stages:
            if refusal := leaves_none(stage, self.model):
                raise ScenarioError(refusal)

    def _check_lengths(self) -> None:
        prompt = self.workload.prompt_len
        output = self.workload.output_len
        worst = self.workload.longest
        held = int(prompt[worst] + output[worst] - 1)
        request = f"request {worst} of {self.workload.name!r}"
        sum_of = f"{prompt[worst]} of its prompt and {output[worst] - 1} of its output: the last is not stored"
        block = self.memory.kv_block
        needed = -(-held // block)
        if needed > self.kv_blocks:
            size = needed * block * self.model.kv_bytes_per_token(self.precision.kv)
            raise CapacityError(
                f"{request} needs a KV cache of {held} tokens ({sum_of}), and kv_capacity={self.memory.kv_capacity!r} "
                f"holds {self.kv_blocks * block}. Give at least kv_capacity={format_bytes_up(size)!r}, or shorten the "
                "request."
            )
        most = self.model.max_position_embeddings
        if held > most:
            raise ScenarioError(
                f"{request} is {held} tokens long ({sum_of}), and {self.model.name} takes {most}. Shorten it by "
                f"{held - most} tokens."
            )

    def _check_groups(self) -> None:
        if self.memory.weights in QUANTISED and self._group is None:
            raise ScenarioError(
                f"experts of {self.model.name} are {self.model.hidden_size} x {self.model.expert_width}, which groups "
                f"of {GROUPS[-1]} columns do not divide, so Memory(weights={self.memory.weights!r}) cannot round them; "
                "leave weights out."
            )

    def _check_sets(self) -> None:
        """Refuse stages of routed experts that do not compute each expert once for each row."""
        every = self.model.num_local_experts
        for each in self.stack:
            ops = [stage.op for stage in each.pipeline.stages if stage.op.plain is experts]
            if ops in ([], [experts]):
                continue
            for layer in range(each.first, each.stop or 0):
                for rows in RowClass.ALL.classes:
                    those = [op for op in ops if rows in op.rows.classes]
                    if those:  # else another operation computes these rows, or a pipeline without one is refused
                        _check_partition(those, every, rows, layer)

    def _check_shares(self) -> None:
        """Refuse shares of what is not streamed."""
        fetched = {item for each in self.stack for item in each.pipeline.fetches}
        for what, asked, streamed, fetch in (
            ("weights_on_gpu", self.memory.weights_on_gpu, fetched - {kv}, "fetch(weights)"),
            ("kv_on_gpu", self.memory.kv_on_gpu, fetched & {kv}, "fetch(kv)"),
        ):
            if asked and not streamed:
                raise ScenarioError(
                    f"Memory({what}={asked:g}) keeps a share of what {fetch} streams; {self.pipeline} streams none. "
                    f"Add {fetch}, or leave {what} out."
                )

    def _check_states(self) -> None:
        """Refuse to stream the KV of layers that keep something else."""
        if self.model.keeps_states and any(kv in each.pipeline.fetches for each in self.stack):
            raise ScenarioError(
                f"some layers of {self.model.name} keep states in the place of keys and values, or an index beside "
                "them, which fetch(kv) does not stream; leave it out and put attention where the KV cache is."
            )

    @property
    def _group(self) -> int | None:
        """Columns that share a scale in rounded experts; None if no number of `GROUPS` divides their sizes."""
        both = math.gcd(self.model.hidden_size, self.model.expert_width)
        return next((group for group in GROUPS if both % group == 0), None)

    @cached_property
    def precision(self) -> Precision:
        """Number formats of weights and KV cache: the memory's, or else the model's own."""
        kv = self.memory.kv or self.model.dtype
        plain = not self.model.has_formats
        if self.memory.weights in QUANTISED:
            others = None if self.model.path else self.model.other_dtype  # a run converts them
            return Precision(self.model.dtype, kv, self.memory.weights, others, self._group)
        if self.memory.weights:
            return Precision(self.memory.weights, kv, as_stored=plain)
        stored = self.model.expert_dtype
        form, group = STORED_INT4.get(stored or "", (stored, None))
        return Precision(self.model.dtype, kv, form, self.model.other_dtype, group)

    @property
    def weight_formats(self) -> str:
        """Formats of the weights in words: ``bf16``, or ``mxfp4 (experts) and bf16``."""
        precision = self.precision
        if self.model.has_formats and precision.as_stored:
            if precision.group is not None:
                return f"{precision.experts} (experts), all others as stored"
            return f"{8 * self.model.weight_bytes / self.model.params:.3g} bits on average"
        experts = precision.experts or precision.weights
        others = precision.others or precision.weights
        return experts if experts == others else f"{experts} (experts) and {others}"

    @cached_property
    def stack(self) -> tuple[LayerRange, ...]:
        """The pipeline of every range of the model's layers.

        Shared experts, if the model has any, follow the routed ones unless a pipeline places them.
        """
        given = self.pipeline if isinstance(self.pipeline, Stack) else self.pipeline[:]
        ranges = given.over(self.model.num_hidden_layers)
        if not self.model.unrouted_params:
            return ranges
        return tuple(each._replace(pipeline=with_shared_experts(each.pipeline)) for each in ranges)

    @property
    def graph(self) -> StackGraph:
        """The layers as a graph, which tells the weights and the KV that stay on the GPU."""
        memory = self.memory
        return _graph(self.stack, self.model, self.routing, self.precision, memory.weights_on_gpu, memory.kv_on_gpu)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """All stages, range after range, each once."""
        return tuple(dict.fromkeys(stage for each in self.stack for stage in each.pipeline.stages))

    @property
    def layer(self) -> Pipeline:
        """The pipeline that all layers have.

        Raises
        ------
        ScenarioError
            If there are several.
        """
        pipelines = {each.pipeline for each in self.stack}
        if len(pipelines) > 1:
            raise ScenarioError(
                f"this reader takes one pipeline for all layers, not {self.pipeline}; use bound, simulate or run."
            )
        return pipelines.pop()

    @property
    def kv_blocks(self) -> int:
        """Number of blocks of the KV cache."""
        if not self.model.kv_elements:
            raise ScenarioError(
                f"no layer of {self.model.name} keeps keys and values, so kv_capacity limits nothing; use a model with "
                "some attention layers."
            )
        return self.memory.blocks(self.model.kv_bytes_per_token(self.precision.kv))

    @cached_property
    def question(self) -> str:
        """Digest of everything that changes a number: lengths, tokens, sizes and rates."""
        return self.question_of(self.workload.generated_len)

    def question_of(self, generated: Lengths) -> str:
        """The question, if each request has generated so many tokens (requests,)."""
        others: list[object] = [self.model, self.machine, self.memory, self.scheduler]
        if self.routing != UNIFORM:
            others.append(self.routing)
        return digest_of(self.workload, generated, others)

    def on(self, **changes: Any) -> Scenario:
        """The same scenario with other fields, such as ``scenario.on(model=..., machine=...)``."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The scenario as plain values.

        Raises
        ------
        ScenarioError
            If an operation of the user's own has no import path, or the scheduler is of the user's own: functions are
            not kept in files.
        """
        return {"format": FORMAT, **plain_fields(**{field.name: getattr(self, field.name) for field in fields(self)})}

    def save(self, path: str | Path) -> Path:
        """Write as versioned JSON."""
        path = Path(path)
        path.write_text(json.dumps(self.to_dict(), indent=1), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Scenario:
        """Read a scenario written by `save`. Import the modules of your own operations before: it imports nothing.

        Raises
        ------
        ScenarioError
            If the file has another format, or is no scenario, or names an operation of a module that is not imported.
        """
        try:
            record = read_json(path)
        except ValueError as error:
            raise ScenarioError(f"{path} is no scenario ({reason(error)}); save it again.") from error
        return cls.from_dict(record, str(path))

    @classmethod
    def from_dict(cls, record: dict[str, Any], where: str) -> Scenario:
        """Read what `to_dict` gave; errors name the place `where` it was found.

        Raises
        ------
        ScenarioError
            As `load` does.
        """
        try:
            found = record.get("format")
            kept = {name: value for name, value in record.items() if name != "format"}
            values = fields_from(kept) if found == FORMAT else {}
        except NotImportedError as error:
            raise ScenarioError(f"{where} {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ScenarioError(f"{where} is no scenario ({reason(error)}); save it again.") from error
        if not values:
            raise ScenarioError(f"{where} was written in another format; this version reads {FORMAT!r}.")
        return cls(**values)

    def diff(self, other: Scenario) -> dict[str, tuple[Any, Any]]:
        """Values in which two scenarios differ, by dotted names such as ``machine.link.h2d``."""
        mine = self.to_dict()
        theirs = other.to_dict()
        if mine["pipeline"] != theirs["pipeline"]:
            mine["pipeline"] = str(self.pipeline)
            theirs["pipeline"] = str(other.pipeline)
        return differences(mine, theirs)

    def __str__(self) -> str:
        capacity = format_bytes(parse_bytes(self.memory.kv_capacity))
        return "\n".join(
            [
                f"pipeline   {self.pipeline}",
                f"model      {self.model}",
                f"machine    {self.machine}",
                f"memory     KV {capacity} = {self.kv_blocks} blocks of {self.memory.kv_block} tokens "
                f"in {self.precision.kv}; weights in {self.weight_formats}{self._shares}",
                f"workload   {self.workload}",
                f"scheduler  {self.scheduler}",
                *([] if self.routing == UNIFORM else [f"routing    {self.routing}"]),
            ]
        )

    @property
    def _shares(self) -> str:
        """The shares of what is streamed that stay on the GPU, in words."""
        memory = self.memory
        told = {"weights": memory.weights_on_gpu, "KV": memory.kv_on_gpu}
        kept = " and ".join(f"{share:.1%} of the {what}" for what, share in told.items() if share)
        return f"; {kept} that would be streamed stay on the GPU" if kept else ""

    def _repr_html_(self) -> str:
        return html_table(line.split(maxsplit=1) for line in str(self).splitlines())


@lru_cache(maxsize=_GRAPHS)
def _graph(
    stack: tuple[LayerRange, ...],
    model: ModelConfig,
    routing: Routing,
    precision: Precision,
    weights_on_gpu: float,
    kv_on_gpu: float,
) -> StackGraph:
    """See `Scenario.graph`; scenarios with the same layers share theirs, in any precision if no shares stay."""
    return with_shares(_streaming_graph(stack, model, routing), precision, weights_on_gpu, kv_on_gpu)


@lru_cache(maxsize=_GRAPHS)
def _streaming_graph(stack: tuple[LayerRange, ...], model: ModelConfig, routing: Routing) -> StackGraph:
    """The layers as a graph, with all that `fetch` streams."""
    marks = tuple(map(routing.mark, range(model.num_hidden_layers)))
    return stack_graph(stack, model, marks if any(each is not None for each in marks) else ())


def _check_partition(ops: list[Op], every: int, rows: RowClass, layer: int) -> None:
    """Refuse operations that do not compute each of `every` experts of a layer once."""
    found = Counter[int]()
    for op in ops:
        found.update(range(every) if op.subset is None else op.subset.of(layer, every))
    if found == Counter(range(every)):
        return
    missing = sorted(set(range(every)) - set(found))
    what = f"none of them has expert {missing[0]}" if missing else "one expert is in two of them"
    named = ", ".join(op.name for op in ops)
    raise ScenarioError(
        f"the {rows.value} rows of layer {layer} need each of {every} experts once, and of {named} {what}; place a set "
        "and its rest, as in experts[hot] and experts[~hot]."
    )
