"""A wiring as cards and edges for the browser, and the edits that its messages ask for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import count
from typing import Any

from workbench.analysis.costs import Cost, Costs
from workbench.core.errors import PipelineError
from workbench.models import ModelConfig
from workbench.pipeline import (
    Element,
    Fault,
    Fork,
    LayerRange,
    Mend,
    Path,
    Pipeline,
    Stack,
    Stored,
    absent,
    added,
    can_be_divided,
    code_of,
    cut_at,
    divided,
    fault_of,
    fetched,
    forked,
    joined,
    lacking,
    merged,
    optioned,
    pipeline_of,
    placed,
    ranges_of,
    removed,
    resolve,
    shared_beside,
    shifted,
    stored,
    with_range,
    with_rows,
    with_set,
    with_stored,
)
from workbench.pipeline.code import TOGETHER
from workbench.pipeline.parsing import WORDS
from workbench.schedules.registry import every_schedule
from workbench.stages import BUILT_IN, ExpertSet, Move, Op, Place, RowClass, Stage, Streamed, experts, kv, weights
from workbench.widgets.parts.words import digits
from workbench.widgets.state.figures import Plain

Message = Mapping[str, Any]
Wiring = Pipeline | Stack
_KEPT = 8
"""Wirings whose faults are kept: one move asks for them several times."""
_SYSTEMS = {
    "CGOPipe": "MoE-Lightning (CGOPipe)",
    "FastDecode": "FastDecode",
    "Fiddler": "Fiddler",
    "FlexGenS3": "FlexGen, attention on the CPU",
    "FlexGenS4": "FlexGen, KV streamed",
    "KTransformers": "KTransformers",
    "LayerStreaming": "Every layer streamed",
    "Overlap": "All on the CPU beside the GPU",
    "Sequential": "All on the GPU",
    "VSLPipe": "MoE-Lens (VSLPipe)",
}
"""Names of the systems whose pipelines can be opened, by their schedules."""


class Wirings:
    """Shows wirings, and changes them as messages say.

    Parameters
    ----------
    names : mapping of str to Op or ExpertSet
        The user's own operations and sets of experts, by the names of their variables.
    """

    def __init__(self, names: Mapping[str, Op | ExpertSet]) -> None:
        self.names = {value.name if name in WORDS else name: value for name, value in names.items()}
        self._faults = lru_cache(maxsize=_KEPT)(self._fault)
        self._mends: dict[int, Wiring] = {}
        self._numbers = count()

    @property
    def sets(self) -> dict[str, ExpertSet]:
        """The user's own sets of experts, by the names of their variables."""
        return {name: value for name, value in self.names.items() if isinstance(value, ExpertSet)}

    # ------------------------------------------------------------------------------------------------------- reading

    def code(self, wiring: Wiring) -> Plain:
        """The code of a wiring for the browser."""
        try:
            name = "layer" if "layer" not in self.names else "wired"
            return {"text": code_of(wiring, self.names, name), "error": "", "line": 0}
        except PipelineError as error:
            return {"text": "", "error": str(error), "line": 0}

    def read(self, text: str) -> Wiring:
        """The wiring that a cell of code makes.

        Raises
        ------
        PipelineError
            If it makes none; see `pipeline_of`.
        """
        return pipeline_of(text, self.names)

    def fault(self, wiring: Wiring, model: ModelConfig) -> tuple[int, Fault] | None:
        """The first range that cannot be one of this model, and why; None if the wiring is whole."""
        return self._faults(wiring, model)

    def mended(self, wiring: Wiring, model: ModelConfig) -> Wiring:
        """The wiring after the first mend of each of its faults, one after the other."""
        while (found := self.fault(wiring, model)) is not None:
            place, fault = found
            wiring = with_range(wiring, place, fault.mends[0].pipeline)
        return wiring

    def _fault(self, wiring: Wiring, model: ModelConfig) -> tuple[int, Fault] | None:
        for place, each in enumerate(ranges_of(wiring)):
            found = fault_of(each.pipeline, self._own(), model)
            if found is not None:
                return place, found
        return None

    # ------------------------------------------------------------------------------------------------------- showing

    def plain(self, wiring: Wiring, model: ModelConfig, costs: Costs | None) -> Plain:
        """A wiring for the browser, with the costs of its stages where they are known."""
        layers = model.num_hidden_layers
        ranges = ranges_of(wiring)
        found = {(cost.place, cost.path): cost for cost in costs.entries if cost.path} if costs is not None else {}
        streams = [cost for cost in costs.entries if not cost.path] if costs is not None else []
        faulty = self.fault(wiring, model)
        fault: Plain | None = None
        self._mends = {}
        if faulty is not None:
            place, why = faulty
            mends = [self._offered(wiring, place, mend) for mend in why.mends]
            path = None if why.path is None else list(why.path)
            unfinished = _is_unfinished(ranges[place].pipeline, why)
            fault = {"range": place, "path": path, "text": why.text, "mends": mends, "unfinished": unfinished}
        known = presets()
        there = {stage.op.plain for each in ranges for stage in each.pipeline.stages}
        return {
            "ranges": [self._range(place, each, layers, model, found, streams) for place, each in enumerate(ranges)],
            "layers": layers,
            "fault": fault,
            "lacks": [] if faulty is not None else self._lacks(wiring),
            "palette": [_entry(name, op, op in there) for name, op in self.palette(model).items()],
            "presets": [
                {"name": name, "label": label, "same": known[name] == wiring}
                for name, label in _SYSTEMS.items()
                if name in known
            ],
            "together": {word: list(ops) for word, ops in TOGETHER.items()},
            "stale": False,
            "refused": "",
            "times": "" if costs is None else _times(costs),
        }

    def _lacks(self, wiring: Wiring) -> list[list[Plain]]:
        """For each range of a whole wiring, the operations that it lacks, with the edits that add them."""
        ranges = enumerate(ranges_of(wiring))
        return [list(self._lacked(wiring, place, each.pipeline)) for place, each in ranges]

    def _lacked(self, wiring: Wiring, place: int, pipeline: Pipeline) -> Iterator[Plain]:
        for op, mends in lacking(pipeline):
            yield {"op": op.name, "mends": [self._offered(wiring, place, mend) for mend in mends]}

    def _offered(self, wiring: Wiring, place: int, mend: Mend) -> Plain:
        """An edit of a range, offered under a number that no other one has."""
        number = next(self._numbers)
        self._mends[number] = with_range(wiring, place, mend.pipeline)
        return {"id": number, "label": mend.label}

    def missing(self, wiring: Wiring) -> list[str]:
        """The operations that a whole wiring lacks; none of a range with the user's own, which may stand for them."""
        own = self._own()
        found = list[str]()
        for each in ranges_of(wiring):
            if not any(stage.op in own for stage in each.pipeline.stages):
                found += [op.name for op in absent(each.pipeline)]
        return list(dict.fromkeys(found))

    def palette(self, model: ModelConfig) -> dict[str, Op]:
        """Operations that can be placed: those of a layer of this model, and the user's own."""
        own = {name: value for name, value in self.names.items() if value in self._own()}
        built_in = {name: op for name, op in BUILT_IN.items() if name not in _AROUND}
        if not model.unrouted_params:
            built_in.pop("shared_experts", None)
        return {**built_in, **own}

    def _own(self) -> tuple[Op, ...]:
        """The user's own operations."""
        return tuple(op for op in self.names.values() if isinstance(op, Op) and not _is_built_in(op))

    def _range(
        self,
        place: int,
        each: LayerRange,
        layers: int,
        model: ModelConfig,
        found: Mapping[tuple[int, Path], Cost],
        streams: list[Cost],
    ) -> Plain:
        first, stop = each.within(layers)
        pipeline = each.pipeline
        carries = _carries(pipeline)
        of_range = {path: cost for (number, path), cost in found.items() if number == place}
        brought = {cost.what: cost for cost in streams if cost.place == place}
        return {
            "first": first,
            "stop": stop,
            "title": f"layers {first} to {stop - 1}" if stop - first > 1 else f"layer {first}",
            "chain": self._chain(pipeline, pipeline.chain, (), carries, of_range, model),
            "fetches": [_fetched(item, label, pipeline, brought) for item, label in _FETCHES],
        }

    def _chain(
        self,
        pipeline: Pipeline,
        chain: tuple[Element, ...],
        path: Path,
        carries: Mapping[Path, str],
        costs: Mapping[Path, Cost],
        model: ModelConfig,
    ) -> list[Plain]:
        """The elements of one chain or arm."""
        return [
            self._element(pipeline, (*path, index), element, carries, costs, model)
            for index, element in enumerate(chain)
        ]

    def _element(
        self,
        pipeline: Pipeline,
        path: Path,
        element: Element,
        carries: Mapping[Path, str],
        costs: Mapping[Path, Cost],
        model: ModelConfig,
    ) -> Plain:
        if isinstance(element, Fork):
            arms = [
                self._chain(pipeline, arm, (*path, number), carries, costs, model)
                for number, arm in enumerate(element.arms)
            ]
            return {"kind": "fork", "path": list(path), "arms": arms}
        cost = costs.get(path)
        seconds = None if cost is None else cost.seconds
        if isinstance(element, Move):
            return {
                "kind": "move",
                "path": list(path),
                "target": element.target.value,
                "carries": carries.get(path, ""),
                "bytes": None if cost is None else cost.moved,
                "seconds": seconds,
            }
        op = element.op
        return {
            "kind": "card",
            "path": list(path),
            "name": op.name,
            "device": element.device.value,
            "about": f"{_which(op.subset, model)}{about(op)}",
            "rows": op.rows.value,
            "shared": bool(model.shared_params) and op.plain is shared_beside(pipeline),
            "split": _half(model) if can_be_divided(element) else "",
            "own": not _is_built_in(op),
            "weights": None if cost is None else cost.weights,
            "flops": None if cost is None else cost.flops,
            "seconds": seconds,
            "share": None if cost is None else cost.share,
            "stored": _stored(pipeline, element),
            "options": _options(pipeline, element, model, self.sets),
        }

    # ------------------------------------------------------------------------------------------------------- editing

    @property
    def verbs(self) -> frozenset[str]:
        """Messages that change a wiring."""
        return frozenset(_EDITS) | {"mend", "clear", "open"}

    def edit(self, wiring: Wiring, message: Message, model: ModelConfig) -> Wiring:
        """The wiring as a message changes it.

        Raises
        ------
        PipelineError
            If the message speaks of what is not there.
        """
        verb = str(message["do"])
        if verb == "clear":
            return Pipeline()
        if verb == "open":
            return presets()[str(message["name"])]
        if verb == "mend":
            return self._mends.get(int(message["id"]), wiring)
        return _EDITS[verb](self, wiring, message, model)


# ------------------------------------------------------------------------------------------------------------- cards

_AROUND = ("embed", "head", "add_shared")
_FETCHES: tuple[tuple[Streamed, str], ...] = (
    (weights, "all weights"),
    (experts.weights, "experts"),
    (experts.chosen, "chosen experts"),
    (kv, "KV cache"),
)
"""What a whole range can stream, and what it is called."""


def _is_unfinished(pipeline: Pipeline, fault: Fault) -> bool:
    """True if what a wiring needs first is a further operation: nothing in it is wrong."""
    return bool(fault.mends) and len(fault.mends[0].pipeline.stages) > len(pipeline.stages)


def _is_built_in(op: Op) -> bool:
    return BUILT_IN.get(op.plain.name) == op.plain


def about(op: Op) -> str:
    """The buffers that an operation reads and writes, in words."""
    reads = [*op.reads, *(("the KV cache",) if op.keeps_kv else ())]
    return f"reads {', '.join(reads)}; writes {', '.join(op.writes)}"


def _which(subset: ExpertSet | None, model: ModelConfig) -> str:
    """The experts of an operation that computes some of them, in words: ``experts 0 to 3 of 8; ``.

    A set whose table has a row for each layer is told by that of the first one.
    """
    if subset is None:
        return ""
    every = model.num_local_experts
    try:
        chosen = subset.of(0, every)
    except PipelineError:  # the card has the fault
        return ""
    if len(chosen) > 1 and chosen[-1] - chosen[0] == len(chosen) - 1:
        return f"experts {chosen[0]} to {chosen[-1]} of {every}; "
    return f"{len(chosen)} of {every} experts; "


def _entry(name: str, op: Op, placed: bool) -> Plain:
    """One entry of the palette."""
    return {"name": name, "label": name, "about": about(op), "own": not _is_built_in(op), "placed": placed}


def _times(costs: Costs) -> str:
    """A sentence on the layer and the batch that times and bytes are of."""
    return (
        f"Times and bytes are of one layer in a typical iteration, with {digits(costs.prefills)} prompt tokens and "
        f"{digits(costs.decodes)} decodes."
    )


def _carries(pipeline: Pipeline) -> dict[Path, str]:
    """The load of each transfer of a whole pipeline, in words; nothing for one that cannot be."""
    try:
        resolved = resolve(pipeline)
    except PipelineError:
        return {}
    return {path: _named(rows) for path, rows in resolved.carries}


def _named(rows: tuple[tuple[str, RowClass], ...]) -> str:
    """Buffers of a transfer: ``k v, q of decode rows``."""
    classes = dict[str, set[RowClass]]()
    for buffer, each in rows:
        classes.setdefault(buffer, set()).add(each)
    whole = [buffer for buffer, found in classes.items() if len(found) > 1]
    parts = [" ".join(whole)] if whole else []
    for each in (RowClass.PREFILL, RowClass.DECODE):
        some = [buffer for buffer, found in classes.items() if found == {each}]
        if some:
            parts.append(f"{' '.join(some)} of {each.value} rows")
    return ", ".join(parts)


def _fetched(item: Streamed, label: str, pipeline: Pipeline, brought: Mapping[str, Cost]) -> Plain:
    """One thing that a range can stream."""
    cost = brought.get(item.name if item in (weights, kv) else "chosen experts" if item.chosen else "weights")
    on = item in pipeline.fetches
    return {
        "name": item.name,
        "on": on,
        "label": label,
        "why": "",
        "bytes": cost.moved if cost is not None and on else None,
        "seconds": cost.seconds if cost is not None and on else None,
    }


def _stored(pipeline: Pipeline, stage: Stage) -> str:
    """The place in which the weights of a stage are kept; empty for one without weights."""
    if not stage.op.has_weights:
        return ""
    return stored(pipeline, stage).value


def _options(pipeline: Pipeline, stage: Stage, model: ModelConfig, sets: Iterable[str]) -> list[Plain]:
    """The options of a card; `sets` are the names of the user's own sets of experts."""
    found = list[Plain]()
    if stage.op.has_weights and stage.device is Place.GPU:
        choices = [each.value for each in Stored if each is not Stored.CHOSEN or stage.op.plain is experts]
        found.append({"name": "fetch", "label": "weights", "value": _stored(pipeline, stage), "choices": choices})
    if stage.op.plain is experts:
        found += _options_of_experts(stage, model, sets)
    return found


def _options_of_experts(stage: Stage, model: ModelConfig, sets: Iterable[str]) -> list[Plain]:
    """The options that routed experts have besides; one that another excludes says so."""
    most = max(0, model.num_experts_per_tok - 1)
    whole = "" if stage.op is experts else "Only all experts of all rows can be put off or left out."
    waits = "Not while experts are deferred or skipped: set these to 0." if stage.defer or stage.skip else ""
    of_set = "Not for a set of experts: choose all of them." if stage.op.subset is not None else ""
    some = stage.op.rows is not RowClass.ALL and stage.op.subset is None
    of_rows = "Not for some of the rows: choose all of them." if some else ""
    subset = "all" if stage.op.subset is None else str(stage.op.subset)
    rows = ["all", "prefill", "decode"]
    those = ["all", *(f"{rest}{name}" for name in (_half(model), *sets) if name for rest in ("", "~"))]
    found: list[Plain] = [
        {"name": "skip", "label": "skip experts", "value": stage.skip, "most": most - stage.defer, "why": whole},
        {"name": "rows", "label": "rows", "value": stage.op.rows.value, "choices": rows, "why": waits or of_set},
        {"name": "experts", "label": "which", "value": subset, "choices": those, "free": True, "why": waits or of_rows},
    ]
    if stage.device is Place.CPU or stage.defer:
        defer = {"name": "defer", "label": "defer experts", "value": stage.defer, "most": most - stage.skip}
        found.insert(0, {**defer, "why": whole})
    return found


def _half(model: ModelConfig) -> str:
    """The first half of the experts of a layer, as a range; empty for a single expert."""
    return f":{model.num_local_experts // 2}" if model.num_local_experts > 1 else ""


def presets() -> dict[str, Pipeline]:
    """The pipelines of the systems of the papers, by the names of their schedules."""
    found = {kind.__name__: kind.example for kind in every_schedule()}
    return {name: example for name, example in found.items() if example is not None and name in _SYSTEMS}


# ------------------------------------------------------------------------------------------------------------- edits


def _of_range(edit: Callable[[Wirings, Pipeline, Message, ModelConfig], Pipeline]) -> _Edit:
    """An edit of one range as an edit of a wiring."""

    def changed(wirings: Wirings, wiring: Wiring, message: Message, model: ModelConfig) -> Wiring:
        place = int(message.get("range", 0))
        ranges = ranges_of(wiring)
        if not 0 <= place < len(ranges):
            raise PipelineError(f"there is no range {place} of layers; the wiring has {len(ranges)}.")
        return with_range(wiring, place, edit(wirings, ranges[place].pipeline, message, model))

    return changed


def _path(message: Message, name: str = "path") -> Path:
    return tuple(int(step) for step in message[name])


def _place(_: Wirings, pipeline: Pipeline, message: Message, __: ModelConfig) -> Pipeline:
    to = _path(message, "to") if "to" in message else None
    return placed(pipeline, _path(message), Place(message["device"]), to)


def _shift(_: Wirings, pipeline: Pipeline, message: Message, __: ModelConfig) -> Pipeline:
    return shifted(pipeline, _path(message), _path(message, "to"))


def _add(wirings: Wirings, pipeline: Pipeline, message: Message, model: ModelConfig) -> Pipeline:
    op = wirings.palette(model)[str(message["op"])]
    return added(pipeline, op, Place(message["device"]), _path(message, "to"))


def _remove(_: Wirings, pipeline: Pipeline, message: Message, __: ModelConfig) -> Pipeline:
    return removed(pipeline, _path(message))


def _option(wirings: Wirings, pipeline: Pipeline, message: Message, model: ModelConfig) -> Pipeline:
    path = _path(message)
    name, value = str(message["name"]), message["value"]
    if name == "defer":
        return optioned(pipeline, path, defer=int(value))
    if name == "skip":
        return optioned(pipeline, path, skip=int(value))
    if name == "fetch":
        return with_stored(pipeline, path, Stored(value))
    if name == "rows":
        return with_rows(pipeline, path, RowClass(value))
    return with_set(pipeline, path, _subset(wirings, str(value), model.num_local_experts))


def _split(_: Wirings, pipeline: Pipeline, message: Message, model: ModelConfig) -> Pipeline:
    return divided(pipeline, _path(message), slice(model.num_local_experts // 2))


def _subset(wirings: Wirings, text: str, every: int) -> ExpertSet | None:
    """Some of so many experts as they are written in brackets: ``:4``, ``~:4``, ``hot``, ``~hot``; None for ``all``."""
    words = text.strip()
    if words == "all":
        return None
    name = words.removeprefix("~").strip()
    named = {each.name: each for each in wirings.sets.values()} | wirings.sets
    found = named.get(name) or _range_of_experts(text, name, every)
    return ~found if words.startswith("~") else found


def _range_of_experts(text: str, name: str, every: int) -> ExpertSet:
    """The set of a name that is a range, such as ``:4``; `text` is all that was written.

    Raises
    ------
    PipelineError
        If it is no range, or one of none or of all of so many experts.
    """
    edges = [edge.strip() for edge in name.split(":")]
    if len(edges) != 2 or not all(re.fullmatch(r"(-?\d+)?", edge) for edge in edges):
        raise PipelineError(
            f"{text!r} names no experts; write a range such as :{every // 2}, ~:{every // 2} for all others, the name "
            "of an ExpertSet, or all."
        )
    first, stop = (int(edge) if edge else None for edge in edges)
    found = ExpertSet.of_slice(slice(first, stop))
    if len(found.of(0, every)) in (0, every):
        raise PipelineError(
            f"{text!r} leaves all or none of the {every} experts out; write a range of some, such as :{every // 2}, or "
            "all."
        )
    return found


def _fetch(_: Wirings, pipeline: Pipeline, message: Message, __: ModelConfig) -> Pipeline:
    item = next(item for item, _label in _FETCHES if item.name == message["name"])
    return fetched(pipeline, item, bool(message["on"]))


def _fork(_: Wirings, pipeline: Pipeline, message: Message, __: ModelConfig) -> Pipeline:
    return forked(pipeline, _path(message), _path(message, "with"))


def _join(_: Wirings, pipeline: Pipeline, message: Message, __: ModelConfig) -> Pipeline:
    return joined(pipeline, _path(message))


def _cut(_: Wirings, wiring: Wiring, message: Message, model: ModelConfig) -> Wiring:
    return cut_at(wiring, int(message.get("range", 0)), int(message["layer"]), model.num_hidden_layers)


def _merge(_: Wirings, wiring: Wiring, message: Message, __: ModelConfig) -> Wiring:
    return merged(wiring, int(message["range"]))


_Edit = Callable[[Wirings, Wiring, Message, ModelConfig], Wiring]
_EDITS: dict[str, _Edit] = {
    "place": _of_range(_place),
    "shift": _of_range(_shift),
    "add": _of_range(_add),
    "remove": _of_range(_remove),
    "split": _of_range(_split),
    "option": _of_range(_option),
    "fetch": _of_range(_fetch),
    "fork": _of_range(_fork),
    "join": _of_range(_join),
    "cut": _cut,
    "merge": _merge,
}
