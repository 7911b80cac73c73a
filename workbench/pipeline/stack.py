"""Stacks of layers: pipelines over ranges of a model's layers, as ``experts_on_cpu[:26] + all_on_gpu[26:]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from workbench.core.display import escaped
from workbench.core.errors import PipelineError
from workbench.core.units import is_whole

if TYPE_CHECKING:
    from workbench.pipeline.algebra import Pipeline

_WHOLE_LAYERS = "cut the whole layer: (fetch(...) | gpu(...) >> ...)[:26] + (...)[26:]."


class LayerRange(NamedTuple):
    """A pipeline and the layers that it describes, from `first` to before `stop`; negative ones count from the end.

    `stop` is None for all layers up to the last.
    """

    pipeline: Pipeline
    first: int = 0
    stop: int | None = None

    @property
    def slice(self) -> str:
        """The range as it is written behind a pipeline: ``[:26]``."""
        return f"[{self.first or ''}:{'' if self.stop is None else self.stop}]"

    def within(self, layers: int) -> tuple[int, int]:
        """The first layer and the one behind the last, counted from the first layer of a model of so many."""
        stop = layers if self.stop is None else self.stop
        return self.first + (layers if self.first < 0 else 0), stop + (layers if stop < 0 else 0)

    def __str__(self) -> str:
        return f"({self.pipeline}){self.slice}"


@dataclass(frozen=True)
class Stack:
    """Pipelines over ranges of layers, each range behind the one before it. Stacks are immutable.

    Attributes
    ----------
    ranges : tuple of LayerRange
    """

    ranges: tuple[LayerRange, ...]

    def __post_init__(self) -> None:
        for before, after in zip(self.ranges, self.ranges[1:], strict=False):
            _check_joint(before, after)

    def __add__(self, other: Stack) -> Stack:
        if not isinstance(other, Stack):
            raise PipelineError(
                f"+ puts ranges of layers behind one another, and {other!r} is none; give its layers: pipeline[26:]."
            )
        return Stack(self.ranges + other.ranges)

    def __rshift__(self, other: object) -> NoReturn:
        raise PipelineError(f">> joins stages, not ranges of layers; {_WHOLE_LAYERS}")

    __rrshift__ = __rshift__

    def __or__(self, other: object) -> NoReturn:
        raise PipelineError(f"| joins stages, not ranges of layers; {_WHOLE_LAYERS}")

    __ror__ = __or__

    def over(self, layers: int) -> tuple[LayerRange, ...]:
        """The ranges set against a model of so many layers: none is empty, and `first` and `stop` are numbers in it.

        Raises
        ------
        PipelineError
            If a range is empty, or a layer is in none or in two of them.
        """
        found = list[LayerRange]()
        for each in self.ranges:
            first, stop = each.within(layers)
            at = found[-1].stop if found else 0
            if stop > layers:
                raise PipelineError(f"{each.slice} ends at layer {stop}, and the model has {layers}; write [...:].")
            if stop <= first:
                raise PipelineError(f"{each.slice} holds none of the model's {layers} layers; leave this range out.")
            if first != at:
                raise PipelineError(_torn(self, each, at, layers))
            found.append(LayerRange(each.pipeline, first, stop))
        if found[-1].stop != layers:
            last = found[-1]
            raise PipelineError(_torn(self, last, last.stop, layers))
        return tuple(found)

    def __str__(self) -> str:
        return " + ".join(map(str, self.ranges))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><td>{escaped(each.slice)}</td><td style='text-align:left'>{each.pipeline._repr_html_()}</td></tr>"
            for each in self.ranges
        )
        return f"<table>{''.join(rows)}</table>"


def cut(pipeline: Pipeline, layers: object) -> Stack:
    """The stack of one range: ``pipeline[2:10]``.

    Raises
    ------
    PipelineError
        If it is no slice of ascending whole numbers with step 1.
    """
    if not isinstance(layers, slice):
        raise PipelineError(f"a pipeline takes a range of layers, as in pipeline[2:10], not [{layers!r}].")
    edges = (layers.start, layers.stop)
    if layers.step not in (None, 1) or not all(edge is None or is_whole(edge) for edge in edges):
        raise PipelineError(f"layers are a range of whole numbers with step 1, not {layers!r}; write [a:b].")
    first = int(layers.start or 0)
    stop = None if layers.stop is None else int(layers.stop)
    if stop is not None and (first < 0) == (stop < 0) and stop <= first:
        mend = "leave this range out" if first == stop else "write the smaller number first"
        raise PipelineError(f"[{first}:{stop}] holds no layer; {mend}.")
    return Stack((LayerRange(pipeline, first, stop),))


def ranges_of(what: Pipeline | Stack) -> tuple[LayerRange, ...]:
    """The ranges of a stack; a pipeline is one range of all layers."""
    return what.ranges if isinstance(what, Stack) else (LayerRange(what),)


def _check_joint(before: LayerRange, after: LayerRange) -> None:
    """Refuse two neighbours whose numbers show that they leave a gap or overlap."""
    stop = before.stop
    if stop is None:
        raise PipelineError(
            f"{before.slice} ends with the last layer, and {after.slice} follows it; give the first range an end."
        )
    if (stop < 0) == (after.first < 0) and stop != after.first:
        what = "leave out" if stop < after.first else "both have"
        low, high = sorted((stop, after.first))
        which = f"layer {low}" if high == low + 1 else f"layers {low} to {high - 1}"
        raise PipelineError(f"{before.slice} and {after.slice} {what} {which}; let the second begin at {stop}.")


def _torn(stack: Stack, one: LayerRange, at: int | None, layers: int) -> str:
    ranges = " + ".join(each.slice for each in stack.ranges)
    return (
        f"{ranges} does not cover the model's {layers} layers once each: see {one.slice}, where layer {at} is next. "
        f"Let every range begin where the one before ends, the first at 0, and the last end at {layers} or [...:]."
    )
