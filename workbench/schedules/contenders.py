"""The contenders of a pipeline: the schedules that a comparison sets side by side unless others are named."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from workbench.core.errors import PipelineError, ScheduleError
from workbench.pipeline import Pipeline, Stack
from workbench.pipeline.stack import LayerRange
from workbench.pipeline.stack_graph import stack_graph
from workbench.schedules.base import Schedule, Step
from workbench.schedules.cgopipe import CGOPipe
from workbench.schedules.fastdecode import FastDecode
from workbench.schedules.fiddler import Fiddler
from workbench.schedules.flexgen import FlexGenS3, FlexGenS4
from workbench.schedules.ktransformers import KTransformers
from workbench.schedules.layer_streaming import LayerStreaming
from workbench.schedules.overlap import Overlap
from workbench.schedules.registry import every_schedule
from workbench.schedules.sequential import Sequential
from workbench.schedules.vslpipe import VSLPipe

_IN_ORDER: tuple[Schedule, ...] = (
    Sequential(prefetch=True),
    LayerStreaming(),
    Fiddler(),
    FlexGenS3(),
    FlexGenS4(),
    FastDecode(),
    CGOPipe(),
    KTransformers(),
    VSLPipe(),
    Overlap(),
)
"""Every schedule with its default settings, the simple ones first. `Sequential()`, without any overlap, is left out."""
_LAYERS = 4


def every_candidate() -> tuple[Schedule, ...]:
    """Every schedule of the package with its default settings: those above in their order, then each other one."""
    kinds = {type(schedule) for schedule in _IN_ORDER}
    others = [kind() for kind in every_schedule() if kind not in kinds]
    return (*_IN_ORDER, *others)


def _layers_of(layers: Pipeline | Stack | Sequence[LayerRange]) -> int:
    """Number of layers with which tasks are compared: the least that a stack can have."""
    if isinstance(layers, Pipeline):
        return _LAYERS
    if not isinstance(layers, Stack):
        return layers[-1].stop or 0
    edges = [abs(edge) for each in layers.ranges for edge in (each.first, each.stop) if edge is not None]
    for count in range(1, sum(edges) + 1):
        with suppress(PipelineError):
            layers.over(count)
            return count
    return sum(edges) + 1


def contenders(layers: Pipeline | Stack | Sequence[LayerRange]) -> tuple[Schedule, ...]:
    """Every schedule that takes a pipeline or a stack of layers, with its default settings.

    The first is the baseline, `Sequential(prefetch=True)`, which takes any pipeline: tasks run one after the other,
    and the next layer's weights stream meanwhile. A schedule that gives the pipeline the same tasks as one before it
    is left out.

    Parameters
    ----------
    layers : Pipeline, Stack, or sequence of LayerRange
        A pipeline for all layers, a stack, or the ranges of a scenario, `Scenario.stack`.

    Raises
    ------
    PipelineError
        If the pipeline is no whole layer.

    Examples
    --------
    >>> from workbench.pipeline import fetch, gpu
    >>> from workbench.stages import attention, kv, moe, out_proj, qkv, weights
    >>> [schedule.name for schedule in contenders(fetch(weights, kv) | gpu(qkv, attention, out_proj, moe))]
    ['Sequential(prefetch=True)', 'FlexGenS4', 'Overlap']
    """
    stack = stack_graph(layers, _layers_of(layers))
    found = dict[object, Schedule]()
    for schedule in every_candidate():
        try:
            found.setdefault(schedule.tasks(stack, Step.MIDDLE), schedule)
        except ScheduleError:
            continue
    return tuple(found.values())
