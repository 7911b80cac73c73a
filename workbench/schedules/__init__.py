"""Schedules lower a pipeline and a batch to a plan (WHEN): they decide order and overlap, never what is computed."""

from workbench.schedules.base import Lowering, Schedule, Step
from workbench.schedules.cgopipe import CGOPipe
from workbench.schedules.contenders import contenders
from workbench.schedules.fastdecode import FastDecode
from workbench.schedules.fiddler import Fiddler
from workbench.schedules.flexgen import FlexGenS3, FlexGenS4
from workbench.schedules.ktransformers import KTransformers
from workbench.schedules.layer_streaming import LayerStreaming
from workbench.schedules.micro_batches import WeightPlace
from workbench.schedules.overlap import Overlap
from workbench.schedules.sequential import Sequential
from workbench.schedules.vslpipe import VSLPipe

__all__ = [
    "CGOPipe",
    "FastDecode",
    "Fiddler",
    "FlexGenS3",
    "FlexGenS4",
    "KTransformers",
    "LayerStreaming",
    "Lowering",
    "Overlap",
    "Schedule",
    "Sequential",
    "Step",
    "VSLPipe",
    "WeightPlace",
    "contenders",
]
