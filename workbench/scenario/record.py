"""Conversion of a scenario's fields to plain values that JSON holds, and back; and the differences of two records."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from reprlib import repr as short
from typing import Any

import numpy as np

from workbench.core.errors import ScenarioError
from workbench.core.records import from_plain, to_plain
from workbench.hardware import Machine
from workbench.models import ModelConfig
from workbench.pipeline import Element, Fork, LayerRange, Pipeline, Stack, adding_sets
from workbench.scenario.memory import Memory
from workbench.scheduler.chunked_prefill import ChunkedPrefill
from workbench.scheduler.continuous import ContinuousBatching
from workbench.scheduler.layered_prefill import LayeredPrefill
from workbench.scheduler.registry import every_scheduler
from workbench.scheduler.resource_aware import ResourceAware
from workbench.scheduler.static import StaticBatching
from workbench.schedules import Schedule
from workbench.schedules.registry import every_schedule
from workbench.stages import (
    BUILT_IN,
    ExpertSet,
    Move,
    Op,
    Place,
    RowClass,
    Stage,
    Streamed,
    combine,
    experts,
    kv,
    weights,
)
from workbench.workload import Frequencies, Request, Routing, Uniform, Workload
from workbench.workload.lengths import whole_lengths

FORMAT = "scenario 1"

_MOVES = {str(move): move for move in (Move(Place.CPU), Move(Place.GPU))}
_LONGEST_PATH = 200
_SCHEDULERS = (ResourceAware, StaticBatching, ContinuousBatching, ChunkedPrefill, LayeredPrefill)
"""Schedulers in the order in which an error names them; others of the package stand behind them."""


class NotImportedError(ScenarioError):
    """A file names an operation of a module that has not been imported."""


def plain_fields(
    pipeline: Pipeline | Stack,
    model: ModelConfig,
    machine: Machine,
    memory: Memory,
    workload: Workload,
    scheduler: object,
    routing: Routing,
) -> dict[str, Any]:
    """The fields of a scenario as JSON holds them.

    Raises
    ------
    ScenarioError
        If an operation has no import path (see `import_path`), weights are streamed of an operation that is in no
        stage, or the scheduler or the routing is of the user's own: functions are not kept in files.
    """
    parts = {
        "pipeline": pipeline,
        "model": model,
        "machine": machine,
        "memory": memory,
        "workload": workload,
        "scheduler": scheduler,
        "routing": routing,
    }
    return {name: plain_part(name, part) for name, part in parts.items()}


def plain_part(name: str, part: Any) -> Any:
    """One part of a scenario, or a schedule under the name "schedule", as JSON holds it.

    Raises
    ------
    ScenarioError
        As `plain_fields` does, and for a schedule of the user's own.
    """
    if name == "pipeline":
        return _plain_stack(part) if isinstance(part, Stack) else _plain_pipeline(part)
    own: dict[str, Callable[[Any], Any]] = {
        "workload": _plain_workload,
        "scheduler": _plain_scheduler,
        "routing": _plain_routing,
        "schedule": _plain_schedule,
    }
    return own.get(name, to_plain)(part)


def part_from(name: str, plain: Any) -> Any:
    """Inverse of `plain_part`.

    Raises
    ------
    TypeError, ValueError, KeyError, AttributeError, NotImportedError
        As `fields_from` does.
    """
    kinds = {"model": ModelConfig, "machine": Machine, "memory": Memory}
    if name in kinds:
        return from_plain(kinds[name], plain)
    own: dict[str, Callable[[Any], Any]] = {
        "pipeline": _stack_from,
        "workload": _workload_from,
        "scheduler": _scheduler_from,
        "routing": _routing_from,
        "schedule": _schedule_from,
    }
    return own[name](plain)


def fields_from(record: dict[str, Any]) -> dict[str, Any]:
    """Inverse of `plain_fields`: arguments of a scenario.

    A user's operation is looked up in its module, which must be imported before: nothing is imported here.

    Raises
    ------
    TypeError, ValueError, KeyError, AttributeError
        If the record is nothing of that kind, or names an operation that is not in its module.
    NotImportedError
        If that module has not been imported.
    """
    _refuse_others(record, "pipeline", "model", "machine", "memory", "workload", "scheduler", "routing")
    names = ("pipeline", "model", "machine", "memory", "workload", "scheduler")
    routing = record.get("routing", {"kind": "Uniform"})
    return {**{name: part_from(name, record[name]) for name in names}, "routing": part_from("routing", routing)}


def differences(mine: Any, theirs: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """Values in which two records differ, by dotted name; of two lists of equal length only the first such entry.

    Sources of values (`sources`, `source`) do not count as differences.
    """
    if mine == theirs or name.endswith((".sources", ".source")):
        return {}
    if isinstance(mine, dict) and isinstance(theirs, dict):
        prefix = f"{name}." if name else ""
        found = dict[str, tuple[Any, Any]]()
        for key in {**mine, **theirs}:
            found |= differences(mine.get(key), theirs.get(key), f"{prefix}{key}")
        return found
    if isinstance(mine, list) and isinstance(theirs, list):
        if len(mine) != len(theirs):
            return {name: (f"{len(mine)} entries", f"{len(theirs)} entries")}
        first = next(index for index, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        return differences(mine[first], theirs[first], f"{name}[{first}]")
    return {name: (mine, theirs)}


def import_path(op: Op) -> str | None:
    """The path from which a user's operation can be imported, ``module:name``; None if there is none.

    The operation is looked for at the top of the modules in which its functions were written.
    """
    made = (op.run, op.work, op.tensors, op.params, op.working)
    for module in dict.fromkeys(getattr(function, "__module__", None) for function in made):
        if module in sys.modules:
            for name, value in vars(sys.modules[module]).items():
                if value is op and _names(f"{module}:{name}"):
                    return f"{module}:{name}"
    return None


def _names(path: str) -> bool:
    """True for a ``module:name`` that is the same operation in every process; built-in ones are saved by their name."""
    module, _, name = path.partition(":")
    spelled = len(path) <= _LONGEST_PATH and all(word.isidentifier() for word in (*module.split("."), name))
    return spelled and module.split(".")[0] not in ("__main__", "__mp_main__", "workbench")


def _looked_up(path: str) -> Op:
    """The operation at an import path, taken from a module that is imported already; it must be an `Op`.

    Raises
    ------
    ValueError
        If it is not there.
    NotImportedError
        If its module has not been imported.
    """
    module, _, name = path.partition(":")
    if not _names(path):
        raise ValueError(f"{short(path)} is neither a built-in operation nor module:name of a module of yours")
    if module not in sys.modules:
        raise NotImportedError(f"names the operation {path!r}; import {module} first, then load.")
    found = vars(sys.modules[module]).get(name)
    if not isinstance(found, Op):
        raise ValueError(f"{path} is no operation")
    return found


def _streamed(ops: Iterable[Op]) -> dict[str, Streamed]:
    """Everything that a pipeline of these operations can stream, by name; built-in operations need no stage."""
    every = (*BUILT_IN.values(), *ops)
    of_ops = [op.weights for op in every]
    chosen = [op.chosen for op in every if op.plain is experts]
    return {item.name: item for item in (weights, kv, *of_ops, *chosen)}


def _plain_stack(stack: Stack) -> list[dict[str, Any]]:
    return [{"layers": [each.first, each.stop], "pipeline": _plain_pipeline(each.pipeline)} for each in stack.ranges]


def _stack_from(record: Any) -> Pipeline | Stack:
    """A pipeline, or the stack of a list of ranges."""
    if not isinstance(record, list):
        return _pipeline_from(record)
    ranges = list[LayerRange]()
    for each in record:
        _refuse_others(each, "layers", "pipeline")
        first, stop = each["layers"]
        ranges += _pipeline_from(each["pipeline"])[first:stop].ranges
    if not ranges:
        raise ValueError("it has no layers")
    return Stack(tuple(ranges))


def _plain_pipeline(pipeline: Pipeline) -> dict[str, Any]:
    known = _streamed(stage.op for stage in pipeline.stages)
    unknown = [item.name for item in pipeline.fetches if known.get(item.name) != item]
    if unknown:
        raise ScenarioError(
            f"fetch({unknown[0]}) streams the weights of an operation that is in no stage and cannot be saved; place "
            "it, or leave its weights out."
        )
    chain = [_plain_element(element) for element in pipeline.chain]
    return {"chain": chain, "fetches": [item.name for item in pipeline.fetches]}


def _plain_element(element: Element) -> Any:
    if isinstance(element, Move):
        return str(element)
    if isinstance(element, Fork):
        return {"arms": [list(map(_plain_element, arm)) for arm in element.arms]}
    op = element.op
    if op.plain is experts and op is not experts:
        subset = None if op.subset is None else to_plain(op.subset)
        return {"op": "experts", "subset": subset, "rows": op.rows.value, "device": element.device.value}
    if op.plain is combine:
        op = combine  # the sets that it adds up follow from the chain
    built_in = BUILT_IN.get(op.name) == op
    saved = op.name if built_in else import_path(op)
    if saved is None:
        raise ScenarioError(
            f"{element} is an operation of your own, whose functions a file cannot hold; define it at the top of a "
            "module, with its functions, and import it from there."
        )
    return {"op": saved, "device": element.device.value, "defer": element.defer, "skip": element.skip}


def _refuse_others(record: dict[str, Any], *keys: str) -> None:
    """Refuse keys that nothing reads: a misspelt key would be silently ignored."""
    unknown = sorted(set(record).difference(keys))
    if unknown:
        raise KeyError(f"unknown {unknown[0]}")


def _pipeline_from(record: dict[str, Any]) -> Pipeline:
    _refuse_others(record, "chain", "fetches")
    chain = Pipeline(adding_sets(tuple(map(_element_from, record["chain"]))))
    known = _streamed(stage.op for stage in chain.stages)
    return replace(chain, fetches=tuple(known[name] for name in record["fetches"]))


def _element_from(record: Any) -> Element:
    if isinstance(record, str):
        return _MOVES[record]
    if "arms" in record:
        _refuse_others(record, "arms")
        return Fork(tuple(tuple(map(_element_from, arm)) for arm in record["arms"]))
    if "rows" in record:
        _refuse_others(record, "op", "subset", "rows", "device")
        return Stage(_variant_from(record), Place(record["device"]))
    _refuse_others(record, "op", "device", "defer", "skip")
    op = BUILT_IN[record["op"]] if record["op"] in BUILT_IN else _looked_up(record["op"])
    return Stage(op, Place(record["device"]), record["defer"], record.get("skip", 0))


def _variant_from(record: dict[str, Any]) -> Op:
    """A set of the routed experts, or these for the rows of a class."""
    op = experts if record["subset"] is None else experts[from_plain(ExpertSet, record["subset"])]
    return {RowClass.ALL: op, RowClass.PREFILL: op.prefill, RowClass.DECODE: op.decode}[RowClass(record["rows"])]


def _plain_routing(routing: Routing) -> dict[str, Any]:
    kind = type(routing)
    if kind not in (Uniform, Frequencies):
        raise ScenarioError(f"the routing {routing!r} is not built in and cannot be saved; use Uniform or Frequencies.")
    return {"kind": kind.__name__, **to_plain(routing)}


def _routing_from(record: Any) -> Routing:
    values = dict(record)
    kinds: dict[str, type[Routing]] = {"Uniform": Uniform, "Frequencies": Frequencies}
    found: Routing = from_plain(kinds[values.pop("kind")], values)
    return found


def _plain_workload(workload: Workload) -> dict[str, Any]:
    """A workload as plain values: its requests, or the lengths alone if it has none."""
    marks: dict[str, Any] = {"name": workload.name, "synthetic": workload.synthetic, "source": workload.source}
    if len(workload.arrival):
        marks["arrival"] = workload.arrival.tolist()
    if len(workload.ends):
        marks["ends"] = workload.ends.tolist()
    if workload.requests:
        return {**marks, "requests": to_plain(workload.requests)}
    return {**marks, "prompt_len": workload.prompt_len.tolist(), "output_len": workload.output_len.tolist()}


def _workload_from(record: dict[str, Any]) -> Workload:
    _refuse_others(record, "name", "synthetic", "source", "arrival", "ends", "requests", "prompt_len", "output_len")
    requests = from_plain(tuple[Request, ...], record.get("requests", []))
    prompts = record.get("prompt_len", [len(request.prompt) for request in requests])
    outputs = record.get("output_len", [request.output_len for request in requests])
    return Workload(
        from_plain(str, record["name"]),
        whole_lengths(prompts, "prompt"),
        whole_lengths(outputs, "output"),
        requests,
        from_plain(bool, record["synthetic"]),
        from_plain(str, record["source"]),
        np.array(from_plain(tuple[float, ...], record.get("arrival", [])), dtype=np.float64),
        whole_lengths(record.get("ends", []), "generated"),
    )


def _plain_scheduler(scheduler: object) -> dict[str, Any]:
    kind = type(scheduler)
    every = _schedulers()
    if every.get(kind.__name__) is not kind:
        known = ", ".join(every)
        raise ScenarioError(f"the scheduler {scheduler!r} is not built in and cannot be saved; use {known}.")
    return {"kind": kind.__name__, **to_plain(scheduler)}


def _scheduler_from(plain: Any) -> Any:
    values = dict(plain)
    return from_plain(_schedulers()[values.pop("kind")], values)


def _plain_schedule(schedule: Schedule) -> dict[str, Any]:
    kind = type(schedule)
    if _schedules().get(kind.__name__) is not kind:
        known = ", ".join(_schedules())
        raise ScenarioError(f"the schedule {schedule!r} is not built in and cannot be saved; use {known}.")
    return {"kind": kind.__name__, **to_plain(schedule)}


def _schedule_from(plain: Any) -> Any:
    values = dict(plain)
    return from_plain(_schedules()[values.pop("kind")], values)


@cache
def _schedules() -> dict[str, type[Schedule]]:
    """Every schedule of the package by its name."""
    return {kind.__name__: kind for kind in every_schedule()}


@cache
def _schedulers() -> dict[str, type]:
    """Every scheduler of the package by its name."""
    kinds: list[type] = [*_SCHEDULERS, *map(type, every_scheduler())]
    return {kind.__name__: kind for kind in kinds}
